"""`recipes/t5.py` whose steps take a second each, so that it meets a job's time limit."""

import time

from toolkit.config.load import load_config
from toolkit.config.schema import SummarizationConfig
from toolkit.errors import exit_on_user_error
from toolkit.launch.log import start_logging
from toolkit.training.finetune import finetune

if __name__ == "__main__":
    with exit_on_user_error():
        start_logging()
        finetune(load_config(SummarizationConfig), after_step=lambda _: time.sleep(1))
