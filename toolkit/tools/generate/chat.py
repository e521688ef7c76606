"""`python -m toolkit generate --chat`: talks to the model in the terminal."""

from __future__ import annotations

from typing import Any

from toolkit.data.rows.example import Example
from toolkit.data.sources.row import check_text
from toolkit.errors import UserError, escape_controls
from toolkit.tools.generate.model import in_own_words, load_generator, open_model


def chat(name: str, dtype: str | None, settings: dict[str, Any]) -> None:
    """Read a turn, print the answer, until the input ends; an empty line, or an error, begins a new chat.

    Raises:
        UserError: the model is an encoder-decoder, or its tokenizer has no chat template.
    """
    with in_own_words():
        opened = open_model(name)
        if not opened.takes_chats():
            why = "is an encoder-decoder" if opened.config.is_encoder_decoder else "has no chat template"
            raise UserError(f"--chat: {name} {why}: give the text as --text")
        generator = load_generator(opened, dtype, settings)
    print("An empty line begins a new chat; Ctrl-D ends.")
    messages: list[dict[str, Any]] = []
    while True:
        try:
            said = input("> ").strip()
            check_text(said, "this turn")
            messages.append({"role": "user", "content": said})
            encoded = generator.encode([("this chat", Example(messages=messages))], plain=False) if said else []
        except (EOFError, KeyboardInterrupt):
            print()
            return
        except (UserError, UnicodeDecodeError) as error:
            print(f"error: {escape_controls(str(error))}", flush=True)
            encoded = []
        if not encoded:
            messages = []
            print("(a new chat)")
            continue
        [answer] = generator.generate(encoded)
        print(escape_controls(answer), flush=True)
        messages.append({"role": "assistant", "content": answer})
