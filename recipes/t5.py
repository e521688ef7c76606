"""Fine-tune an encoder-decoder (T5, BART, Pegasus, …) to summarize, sharded as the accelerate YAML says.

accelerate launch --config_file accelerate_configs/fsdp2_cpu.yaml recipes/t5.py --config recipes/configs/t5_functions.yaml
python -m toolkit train recipes/configs/t5_csv.yaml --data.files articles.csv --train.num_epochs 3
"""

from toolkit.config.load import load_config
from toolkit.config.schema import SummarizationConfig
from toolkit.errors import exit_on_user_error
from toolkit.launch.log import start_logging


def main() -> None:
    """The objective, which `SummarizationConfig` names, is `toolkit/objectives/seq2seq.py`: sources with targets.

    The way of the data, which `finetune()` in `toolkit/training/finetune.py` calls in this order:

    1. `setup.py`: `setup_run()` checks both YAML files, opens the run folder and chooses the checkpoint to resume from.
    2. `model.py`: `build_skeleton()` builds the model on the meta device, so that a mistake shows before anything loads.
    3. `data.py`: `prepare_data()` reads sources and targets, tokenizes them once, and plans which rows each step takes.
    4. `model.py`: `build_model()` loads the weights, freezes or adapts them, shards them and builds the optimizer.
    5. `run.py`: `start_run()` resumes from this run's last checkpoint, if there is one.
    6. `loop.py`: `train()` takes a step, logs, evaluates, saves, until the run is over.
    7. `run.py`: `finish()` exports the model, compares it with the trained one, and prints the results.
    """
    config = load_config(SummarizationConfig, description=__doc__)

    # This import takes seconds, so a wrong flag has been reported before it.
    from toolkit.training.finetune import finetune

    finetune(config)


if __name__ == "__main__":
    with exit_on_user_error():
        start_logging()
        main()
