"""Train a causal language model on pairs of answers (DPO, IPO, SimPO, ORPO), fully or with an adapter, sharded as the accelerate
YAML says.

accelerate launch --config_file accelerate_configs/fsdp2_cpu.yaml recipes/dpo.py --config recipes/configs/dpo.yaml
python -m toolkit train recipes/configs/dpo.yaml --data.files pairs.jsonl --train.num_epochs 1
"""

from toolkit.config.load import load_config
from toolkit.config.schema import PreferenceConfig
from toolkit.errors import exit_on_user_error
from toolkit.launch.log import start_logging


def main() -> None:
    """The way of the data is that of `recipes/t5.py`. The objective is `toolkit/objectives/preference.py`:

    - A row is a prompt with a chosen and a rejected answer, as texts or as messages.
    - Before the first step, the log-probabilities of all answers are computed once, and kept in the run folder: the reference.
    """
    config = load_config(PreferenceConfig, description=__doc__)

    # This import takes seconds, so a wrong flag has been reported before it.
    from toolkit.training.finetune import finetune

    finetune(config)


if __name__ == "__main__":
    with exit_on_user_error():
        start_logging()
        main()
