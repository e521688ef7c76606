"""Train an encoder-decoder on pairs of answers (DPO, IPO, SimPO, ORPO), fully or with an adapter, sharded as the accelerate YAML
says.

accelerate launch --config_file accelerate_configs/fsdp2_cpu.yaml recipes/dpo_t5.py --config recipes/configs/dpo_t5.yaml
python -m toolkit train recipes/configs/dpo_t5.yaml --data.files pairs.jsonl --train.num_epochs 1
"""

from toolkit.config.load import load_config
from toolkit.config.schema import Seq2SeqPreferenceConfig
from toolkit.errors import exit_on_user_error
from toolkit.launch.log import start_logging


def main() -> None:
    """The way of the data is that of `recipes/t5.py`. The objective is `toolkit/objectives/preference.py`: a prompt is
    encoded once for its chosen and its rejected answer; else all is as in `recipes/dpo.py`."""
    config = load_config(Seq2SeqPreferenceConfig, description=__doc__)

    # This import takes seconds, so a wrong flag has been reported before it.
    from toolkit.training.finetune import finetune

    finetune(config)


if __name__ == "__main__":
    with exit_on_user_error():
        start_logging()
        main()
