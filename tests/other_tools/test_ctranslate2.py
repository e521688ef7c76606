"""CTranslate2 on the export of a T5: converted by its command, it writes the texts of the run's own evaluation."""

from tests.other_tools.conftest import run_command
from toolkit.files.json_lines import load_json_lines

PREFIX, MAX_SOURCE, MAX_NEW, STEPS = "summarize: ", 40, 8, 200


def test_greedy_texts_are_those_of_the_run(bench, tmp_path):
    how = {
        "data__prefix": PREFIX,
        "data__max_source_length_tokens": MAX_SOURCE,
        "eval__max_new_tokens": MAX_NEW,
        "eval__num_beams": 1,
    }
    bench.run("run", **how, train__max_steps=STEPS, optim__lr=0.01, optim__schedule="constant", eval__num_rows=6)
    folder = bench.runs / "run" / "export"
    ours = load_json_lines(bench.runs / "run" / f"predictions-{STEPS}.jsonl")
    run_command("ct2-transformers-converter", "--model", folder, "--output_dir", tmp_path / "ct2", cwd=tmp_path)

    import ctranslate2
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = load_json_lines(bench.data / bench.rows)
    prompts = [PREFIX + rows[row["row_id"]]["source"] for row in ours]
    encoded = [tokenizer(prompt, truncation=True, max_length=MAX_SOURCE)["input_ids"] for prompt in prompts]
    translator = ctranslate2.Translator(str(tmp_path / "ct2"))
    found = translator.translate_batch(
        [tokenizer.convert_ids_to_tokens(ids) for ids in encoded], beam_size=1, max_decoding_length=MAX_NEW
    )
    texts = [tokenizer.decode(tokenizer.convert_tokens_to_ids(row.hypotheses[0]), skip_special_tokens=True) for row in found]
    assert texts == [row["prediction"] for row in ours]
    assert len(set(texts)) > 1 and all(texts)
