"""Fine-tune a causal language model (Llama, Qwen, Gemma, …), fully or with an adapter, sharded as the accelerate YAML says.

accelerate launch --config_file accelerate_configs/fsdp2_cpu.yaml recipes/llm.py --config recipes/configs/llm_stdlib.yaml
python -m toolkit train recipes/configs/llm_chat_lora.yaml --data.files chats.jsonl --train.num_epochs 3
"""

from toolkit.config.load import load_config
from toolkit.config.schema import LLMConfig
from toolkit.errors import exit_on_user_error
from toolkit.launch.log import start_logging


def main() -> None:
    """The way of the data is that of `recipes/t5.py`. The objective, which `LLMConfig` names, is `toolkit/objectives/causal.py`:

    - Rows are chats, prompts with completions, or plain texts, of one source or a mix, packed or not.
    - Before training, it checks that no token sees a later one, and that packed rows do not see each other.
    """
    config = load_config(LLMConfig, description=__doc__)

    # This import takes seconds, so a wrong flag has been reported before it.
    from toolkit.training.finetune import finetune

    finetune(config)


if __name__ == "__main__":
    with exit_on_user_error():
        start_logging()
        main()
