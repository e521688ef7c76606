"""Compares the records of the runs. Each check gives rows of the table, passed or FAILED."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np

from toolkit.config.schema import OptimConfig
from toolkit.optimizers import state_bytes
from toolkit.tools.verify import proofs
from toolkit.tools.verify.proofs import Proof, equal, exact, largest, named, prove, relative, within
from toolkit.tools.verify.runs import NUM_STEPS, SAVED_STEP, Tensors, WatchedRun

GRADIENT_FLOOR = 0.01
"""A gradient that is zero up to rounding (an attention key's bias) is compared with this fraction of the model's mean one."""
LATE_TOLERANCE = 0.01
"""Tolerance for gradients in step 2: if one of step 1 is zero up to rounding, Adam may move that weight either way."""
RELU_TOLERANCE = 0.01
"""Least tolerance for gradients of a model with ReLUs: a unit whose input is zero up to rounding may be open in one run only.

One such unit of 512, in a T5 of 900,000 parameters, changed its layer's gradient by 1.4e-3 and the global norm by 3.5e-5.
"""
BF16_TOLERANCE = 0.05
"""Largest relative difference of a loss or gradient norm in bf16 from that in fp32; a number in bf16 is off by up to 0.4 %."""
LOSSES = ("loss", "router_aux_loss")
"""Of a line of a step; the second of a mixture of experts."""
NOT_COMPARED = {"kind", "step", "rows_per_s", "measured_on", "rouge_tokenizer"}
NOT_COMPARED |= {f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")}
"""Of a line of an evaluation. Rewards of pairs are 0 before the first step, up to rounding."""
SHARD_SLACK = 0.01
"""Padding that FSDP may add to a rank's share, as a fraction."""


def check_all(runs: dict[str, WatchedRun], tolerance: float, optim: OptimConfig, *, expects_frozen: bool) -> list[Proof]:
    """All checks without plain transformers. A run that ended early fails the check `run`, and leaves others not reached."""
    reference, main, resharded = runs["reference"], runs["preset-0"], runs["resharded"]
    dropout, resumed, again = runs["dropout"], runs["resumed"], runs["resumed-again"]
    others = [run for name, run in runs.items() if name == "ddp" or name.startswith("preset-")]
    strategies, with_curves = [reference, *others], [*others, resharded]
    recomputing = [
        (runs.get(name.replace("kept", "recomputed"), dropout), kept) for name, kept in runs.items() if name.startswith("kept-")
    ]

    def only(wanted: str) -> list[WatchedRun]:
        return [run for name, run in runs.items() if name == wanted]

    # Each check with its runs; `reference` and the like are what they are compared with.
    checks: list[tuple[str, list[WatchedRun], Callable[[WatchedRun], Proof | None]]] = [
        ("start", others, partial(compare_starts, reference)),
        ("rows", with_curves, partial(compare_rows, reference)),
        ("loss", with_curves, lambda run: compare_figures(reference, run, *LOSSES, tolerance=tolerance)),
        ("gradients", others, partial(compare_gradients, reference, tolerance=tolerance)),
        ("gradients", others, partial(compare_late_gradients, reference)),
        ("evaluation", with_curves, partial(compare_evaluations, reference, tolerance=tolerance)),
        ("modes", list(runs.values()), check_modes),
        *(
            ("recomputation", [run], partial(compare_gradients, kept, tolerance=tolerance, remark=", with activations kept"))
            for run, kept in recomputing
        ),
        ("bf16", only("bf16"), lambda run: compare_figures(reference, run, "loss", "grad_norm", tolerance=BF16_TOLERANCE)),
        ("sharding", [run for run in strategies if run.num_shards], partial(check_shards, optimizer=optim.name)),
        ("moved", strategies, check_moved),
        ("frozen", strategies, partial(check_frozen, expects_frozen=expects_frozen)),
        ("save", [resharded], partial(compare_loaded, main)),
        ("save", [resumed], partial(compare_loaded, dropout)),
        ("save", [again], partial(compare_loaded, resumed)),
        ("resume", [resumed, again], partial(compare_resumed, dropout)),
        # Under DDP after evaluations: the same elements are dropped.
        ("resume", only("ddp-dropout"), lambda run: compare_figures(dropout, run, "loss", tolerance=tolerance)),
        ("update", strategies, partial(proofs.check_updates, config=optim)),
        ("dropout", [dropout], proofs.check_dropout),
    ]
    proven = [proof for check, of, work in checks for run in of for proof in prove(check, run, work)]
    failed = [Proof(check="run", compared=run.title, detail=run.failure) for run in runs.values() if run.failure]
    return [*proven, *failed]


# --- What must be equal for all numbers of processes, micro-batches and presets.


def compare_starts(reference: WatchedRun, run: WatchedRun) -> Proof:
    """Check that the weights before the first step, trainable and frozen, are bit for bit those of the reference."""
    title = f"{run.title}: weights as loaded"
    frozen = (of.about("loaded")["frozen"] for of in (reference, run))
    proof = equal(title, frozen, f"is not what {reference.title} loads")
    return _same_tensors(title, reference.tensors("loaded"), run.tensors("loaded")) if proof.passed else proof


def compare_rows(reference: WatchedRun, run: WatchedRun) -> Proof:
    """Check that every step takes the same rows, and none twice."""
    expected, actual = reference.rows_of_steps(), run.rows_of_steps()
    rows = [{f"step {step}": sorted(of[step]) for step in actual if step in of} for of in (expected, actual)]
    return equal(f"{run.title}: rows of {len(actual)} steps", rows, "takes other rows, or some twice")


def compare_figures(reference: WatchedRun, run: WatchedRun, *names: str, tolerance: float) -> Proof:
    """Compare these figures of every step, as far as it has them."""
    lines = run.lines("train")
    found = [name for name in names if name in lines[0]]
    return within(f"{run.title}: {', '.join(found)} of {len(lines)} steps", *_largest_of_lines(reference, run, *found), tolerance)


def compare_evaluations(reference: WatchedRun, run: WatchedRun, tolerance: float) -> Proof | None:
    """Compare all figures of all evaluations that both had; None without evaluation rows. What counts tokens or texts is compared
    before the first step only, where weights are equal to the last bit: later a rounding may change which token is first."""
    expected = {line["step"]: line for line in reference.lines("eval", needed=False)}
    if not expected:
        return None
    lines = {line["step"]: line for line in run.lines("eval") if line["step"] in expected}
    worst, names = (0.0, ""), set()
    for step, line in lines.items():
        for name in (line.keys() & expected[step].keys()) - NOT_COMPARED:
            if step == 0 or name.endswith(("loss", "perplexity", "bits_per_byte")):
                worst = max(worst, (_relative(line[name], expected[step][name]), f"{name} after step {step} differs"))
                names.add(name)
    steps = ", ".join(map(str, lines))
    title = f"{run.title}: {len(names)} figures of {line['num_rows']} rows after steps {steps}"
    return within(title, *worst, tolerance)


def check_modes(run: WatchedRun) -> Proof:
    """Check that all modules were in training mode whenever the run trained, as after an evaluation, and none in evaluations."""
    about = run.about("trained")
    training, evaluation = about["num_forwards"].values()
    title = f"{run.title}: {training} forwards that train, {evaluation} that evaluate"
    return exact(title, len(about["wrong_modes"]), next(iter(about["wrong_modes"]), ""))


def compare_gradients(reference: WatchedRun, run: WatchedRun, tolerance: float, remark: str = "") -> Proof:
    """Compare the unsharded gradients of step 1 before clipping, relative to their norms, and the global norm of every step."""
    expected, actual = reference.tensors("gradients"), run.tensors("gradients")
    worst = max(largest_gradient(expected, actual), _largest_of_lines(reference, run, "grad_norm"))
    title = f"{run.title}: {len(expected)} tensors, {NUM_STEPS} norms"
    if reference.about("loaded")["has_relu"]:
        title, tolerance = f"{title} (with ReLU)", max(tolerance, RELU_TOLERANCE)
    return within(f"{title}{remark}", *worst, tolerance)


def compare_late_gradients(reference: WatchedRun, run: WatchedRun) -> Proof | None:
    """Compare the unsharded gradients of step 2 whose step 1 was zero, as LoRA's A while B is zero; None if there are none."""
    zero = {name for name, gradient in reference.tensors("gradients").items() if not gradient.any()}
    if not zero:
        return None
    late = [{name: g for name, g in of.tensors("late_gradients").items() if name in zero} for of in (reference, run)]
    title = f"{run.title}: {len(zero)} tensors that are zero in step 1, in step 2"
    return within(title, *largest_gradient(*late), LATE_TOLERANCE)


def _largest_of_lines(reference: WatchedRun, run: WatchedRun, *figures: str) -> tuple[float, str]:
    """The largest relative difference of these figures in any step's line of metrics.jsonl, and where it is."""
    expected = {line["step"]: line for line in reference.lines("train")}
    return max(
        (_relative(line[figure], expected[line["step"]][figure]), f"largest in {figure} of step {line['step']}")
        for line in run.lines("train")
        for figure in figures
    )


def largest_gradient(expected: Tensors, actual: Tensors) -> tuple[float, str]:
    """The largest difference of two sets of gradients, relative to their norms, and where it is."""
    if one_sided := expected.keys() ^ actual.keys():
        return math.inf, f"{min(one_sided)} has a gradient on one side only"
    squares = sum(float(np.square(g, dtype=np.float64).sum()) for g in expected.values())
    mean = math.sqrt(squares / max(1, sum(g.size for g in expected.values())))

    def difference(name: str, gradient: np.ndarray) -> float:
        if actual[name].shape != gradient.shape:
            return math.inf
        return relative(actual[name] - gradient, gradient, GRADIENT_FLOOR * mean * math.sqrt(gradient.size))

    return max((difference(name, gradient), f"largest in {name}") for name, gradient in expected.items())


# --- What each rank holds.


def check_shards(run: WatchedRun, optimizer: str) -> Proof:
    """Check that no rank holds more of the parameters than its shard, nor ranks on average more of the moments, as under DDP.

    Moments are averaged because FSDP1 shards trainable and frozen parameters together: one rank may hold most of the former.
    """
    about, num_shards = run.about(f"saved-{SAVED_STEP}"), run.num_shards or 1
    totals, fair = Counter[str](), Counter[str]()
    for parameter in about["parameters"].values():
        shape, size = tuple(parameter["shape"] or [1]), parameter["itemsize"]
        part = (-(-shape[0] // num_shards), *shape[1:])
        totals["parameters"] += math.prod(shape) * size
        fair["parameters"] += math.prod(part) * size
        if parameter["is_trainable"]:
            totals["moments"] += state_bytes(optimizer, shape)
            fair["moments"] += state_bytes(optimizer, shape, part)
    held = {
        "parameters": max(rank["parameter_bytes"] for rank in about["ranks"]),
        "moments": sum(rank["moment_bytes"] for rank in about["ranks"]) / len(about["ranks"]),
    }
    shares = {kind: (bytes_held / totals[kind], fair[kind] / totals[kind]) for kind, bytes_held in held.items()}
    name, (share, limit) = max(shares.items(), key=lambda item: item[1][0] - item[1][1])
    where = ", ".join(about["placements"])
    title = f"{run.title}: largest share of a rank" + (f", {where}" if where else "")
    return within(title, share, f"a rank holds {share:.0%} of the {name}", limit + SHARD_SLACK)


def check_moved(run: WatchedRun) -> Proof:
    """Check that every trainable parameter has changed since the start; an adapter's rows of new tokens rest until one occurs."""
    before, after = run.tensors("loaded"), run.tensors("trained")
    names = [name for name in before if name.startswith("model.") and ".trainable_tokens_delta." not in name]
    still = [name for name in names if before[name].tobytes() == after.get(name, before[name]).tobytes()]
    return exact(f"{run.title}: {len(names)} trainable tensors", len(still), named(still, "has not moved"))


def check_frozen(run: WatchedRun, expects_frozen: bool) -> Proof | None:
    """Check that every frozen parameter is bit for bit unchanged; None if nothing is frozen, and nothing should be."""
    before, after = run.about("loaded")["frozen"], run.about("trained")["frozen"]
    if not before:
        return Proof(compared=run.title, detail="nothing is frozen") if expects_frozen else None
    return equal(f"{run.title}: {len(before)} frozen tensors", (before, after), "has changed")


# --- Checkpoints.


def compare_loaded(of: WatchedRun, run: WatchedRun) -> Proof:
    """Check that a run loads a checkpoint's weights and moments bit for bit as they were saved, and, if there are as many ranks,
    their random states."""
    name = f"saved-{run.from_step}"
    saved, title = of.tensors(name), f"{of.title}, step {run.from_step}"
    before, after = of.about(name)["random"], run.about("loaded")["random"]
    are_as_many = len(before) == len(after)
    what = f"{len(saved)} tensors" + (f", {len(before)} random states" if are_as_many else "")
    proof = _same_tensors(f"{title}, loaded by {len(after)}: {what}", saved, run.tensors("loaded"))
    states = [{f"rank {place}": state for place, state in enumerate(of_ranks)} for of_ranks in (before, after)]
    return equal(proof.compared, states, "has another random state") if proof.passed and are_as_many else proof


def compare_resumed(whole: WatchedRun, resumed: WatchedRun) -> Proof:
    """Check that a resumed run with dropout is bit for bit the uninterrupted one: rows, losses, gradient norms, learning rates,
    final weights and moments. In a model without dropout this does not test the random state."""
    after = [line for line in whole.lines("train") if line["step"] > resumed.from_step]
    lines = resumed.lines("train")
    title = f"{resumed.title} after step {resumed.from_step}: curves, weights, moments"
    if not any(probe["loss"] != probe["plain_loss"] for probe in whole.about("trained")["dropout"]):
        title += " (dropout changes nothing in this model)"
    if len(lines) != len(after):
        return Proof(compared=title, detail=f"steps {[line['step'] for line in lines]} were logged")
    for expected, line in zip(after, lines, strict=True):
        for figure in ("step", "loss", "grad_norm", "learning_rate", "num_tokens"):
            if line[figure] != expected[figure]:
                difference = _relative(line[figure], expected[figure])
                return exact(title, difference, f"{figure} of step {expected['step']} differs")
    rows = whole.rows_of_steps()
    if wrong := [step for step, of_step in resumed.rows_of_steps().items() if of_step != rows[step]]:
        return exact(title, 1.0, f"step {wrong[0]} takes other rows")
    return _same_tensors(title, whole.tensors(f"saved-{NUM_STEPS}"), resumed.tensors(f"saved-{NUM_STEPS}"))


def _same_tensors(title: str, expected: Tensors, actual: Tensors) -> Proof:
    if expected.keys() != actual.keys():
        return exact(title, math.inf, f"{min(expected.keys() ^ actual.keys())} is on one side only")
    unequal = {name: largest(actual[name], t) for name, t in expected.items() if t.tobytes() != actual[name].tobytes()}
    return exact(title, max(unequal.values(), default=0.0), named(sorted(unequal), "differs"))


def _relative(actual: float | None, expected: float | None) -> float:
    """Relative difference of two figures in metrics.jsonl, which has null for a value that was not finite."""
    return math.inf if actual is None or expected is None else relative(actual - expected, expected)
