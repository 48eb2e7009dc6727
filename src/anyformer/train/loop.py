"""The training loop: steps, evaluation, samples, checkpoints, and a clean end whatever happens."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anyformer.errors import UserError
from anyformer.infer import Sampling, generate
from anyformer.nn.model import Model, build
from anyformer.report import write_report
from anyformer.train import state as states
from anyformer.train.data import TrainingData, fingerprint
from anyformer.train.evaluate import Score, evaluate_split, evaluating
from anyformer.train.lock import sole_trainer
from anyformer.train.loss import Batch
from anyformer.train.measure import PeakMemory, forward_seconds, now, step_seconds
from anyformer.train.metrics import MetricsFile, Observer, Record, TensorBoard, require_tensorboard
from anyformer.train.optim import Optimizer
from anyformer.train.parallel import World, join, share
from anyformer.train.planned import steps_of
from anyformer.train.run import Run, load_run
from anyformer.train.schedule import ratio
from anyformer.train.setup import Job, Progress, corpus_mark, initial, require_compiler, set_up, write_run_file
from anyformer.train.signals import StopRequest
from anyformer.train.state import TrainState
from anyformer.train.step import Diverged, precision_context, train_step

Source = str | Path | dict[str, Any] | Run


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        folder: the run folder.
        step, steps: updates made, and asked for.
        finished: whether all were made.
        signum: the signal that stopped it, None otherwise.
        score: the last evaluation; None without validation text.
        best_step, best_loss: the best evaluation.
        tokens: targets learned from.
        seconds: time spent in steps.
    """

    folder: Path
    step: int
    steps: int
    finished: bool
    signum: int | None
    score: Score | None
    best_step: int | None
    best_loss: float | None
    tokens: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON knows it."""
        score = None if self.score is None else self.score.to_dict()
        return {**self.__dict__, "folder": str(self.folder), "score": score}


def train(
    run: Source,
    *,
    root: str | Path = "runs",
    resume: bool = False,
    fresh: bool = False,
    observers: Sequence[Observer] = (),
    signals: bool = False,
    notice: Callable[[str], None] | None = None,
    preparing: Progress | None = None,
    report: bool = True,
    command: str | None = None,
) -> Result:
    """Trains a run into `root`/name, silently. The global random state is afterwards as it was.

    Args:
        run: a `Run`, or what `load_run` takes.
        root: the folder of runs.
        resume: go on from the last checkpoint; on a CPU in float32 the result is that of an uninterrupted run, bit for
            bit.
        fresh: remove the run of this name first.
        observers: see every metric as it is written.
        signals: let SIGINT and SIGTERM end the run after the current step, with a checkpoint.
        notice: called with the name of such a signal, from its handler.
        preparing: called with bytes done and in all while a corpus is encoded.
        report: write report.html at the end.
        command: how a person goes on with this run, for run.json and the report of a stopped one.

    Raises:
        UserError: a description, data or checkpoint that cannot work; a run that another process trains; a loss that
            is no longer finite (`Diverged`).
    """
    run = load_run(run)
    world, device = join(run.train.device, run.train.batch)
    if run.track.tensorboard:
        require_tensorboard()
    if run.train.compile:
        require_compiler(device)
    cuda = [device] if device.type == "cuda" else []
    with sole_trainer(Path(root) / run.name, world):
        job = set_up(run, Path(root), resume=resume, fresh=fresh, world=world, progress=preparing)
        with torch.random.fork_rng(cuda), StopRequest(notice, enabled=signals) as stop:
            trainer = _Trainer(job, world, device, stop, report=report, command=command)
            return trainer.run_all(observers)


class _Trainer:
    """A model being trained, with everything that a step needs."""

    def __init__(
        self, job: Job, world: World, device: torch.device, stop: StopRequest, *, report: bool, command: str | None
    ) -> None:
        self.job, self.run, self.world, self.device, self.stop = job, job.run, world, device, stop
        self.report, self.command, self.memory = report, command, PeakMemory(device)
        run, corpus = job.run, job.corpus
        torch.manual_seed(run.seed + world.rank)
        self.model: Model = build(job.spec, seed=run.seed, init=initial(run), device=device)
        self.model.train()
        self.optimizer = Optimizer(self.model, run.optimizer)
        packed = run.data.packing == "documents"
        self.data = TrainingData(
            corpus.train.tokens,
            corpus.train.documents if packed else None,
            context=run.data.context,
            batch=run.train.batch,
            seed=run.seed,
        )
        self.share = share(run.train.batch, world.rank, world.size)
        self.observers: list[Observer] = []
        self.forward: torch.nn.Module = self.model
        if run.train.compile:
            self.forward = torch.compile(self.model)  # type: ignore[assignment]
        self._check_samples()
        self.state = self._restored()
        self.saved = self.state.step if job.checkpoint is not None else None

    def _check_samples(self) -> None:
        """A prompt that cannot be continued is said now and not after the first hundred steps."""
        if self.run.sample.prompts:
            with evaluating(self.model):
                generate(
                    self.model, self.job.corpus.tokenizer, list(self.run.sample.prompts), Sampling(max_new_tokens=1)
                )

    def _restored(self) -> TrainState:
        mark = corpus_mark(self.job.corpus)
        folder = self.job.checkpoint
        if folder is None:
            steps = steps_of(self.run) or self._measured_steps(0, 0.0)
            return TrainState(steps=steps, context=self.run.data.context, corpus=mark)
        state = states.read_state(folder)
        if state.corpus != mark:
            remedy = "put the corpus back, or begin again with --fresh"
            raise UserError(
                "the data are not those that the run began with", where=self.job.corpus.folder, remedy=remedy
            )
        random = states.restore(folder, model=self.model, optimizer=self.optimizer, device=self.device)
        if len(random) != self.world.size:
            got, expected = f"{self.world.size} processes", len(random)
            raise UserError(
                "the run was saved by another number of processes", where=folder, got=got, expected=expected
            )
        if not self.job.same_length():
            state.steps = steps_of(self.run) or self._measured_steps(state.step, state.seconds)
        states.set_random_state(random[self.world.rank], self.device)
        if state.steps < state.step:
            got = f"{state.steps} steps"
            raise UserError(
                "the run is past that step already", where=folder, got=got, expected=f"at least {state.step}"
            )
        return state

    def _measured_steps(self, done: int, seconds: float) -> int:
        """How many updates there will be when the run's minutes are over, evaluations counted in."""
        minutes, looks = self.run.train.minutes, self.run.train.evaluate_every
        assert minutes is not None
        precision, device = self.run.train.precision, self.device
        batches = self._batches(self._host_batch(done))
        update = step_seconds(self.forward, batches, self.optimizer.zero_grad, precision=precision, device=device)
        evaluation, split = 0.0, self.job.corpus.val
        if split.n_tokens > 1:
            passes = split.n_tokens / (batches[0].n_rows * self.run.data.context) / self.world.size
            evaluation = passes * forward_seconds(self.model, batches[0], precision=precision, device=device)
        left = minutes * 60 - seconds
        steps = (left - 10 * evaluation) / update if looks is None else left / (update + evaluation / looks)
        return done + max(1, int(self.world.same(steps)))

    def _every(self, asked: int | None) -> int:
        return asked or max(1, round(self.state.steps / 10))

    def run_all(self, observers: Iterable[Observer]) -> Result:
        """From the state's step to the end, or to a signal."""
        if self.world.rank == 0:
            self._open(observers)
        try:
            self._tell_start()
            self._steps()
        except Diverged as error:
            self._close("diverged", str(error))
            raise
        else:
            result = self._result()
            self._close("finished" if result.finished else "stopped")
            return result
        finally:
            for observer in self.observers:
                observer.end()

    def _close(self, word: str, reason: str | None = None) -> None:
        """The last words in the run folder, and its report."""
        if self.world.rank == 0:
            self._describe(word, reason)
            if self.report:
                write_report(self.job.folder)

    def _open(self, observers: Iterable[Observer]) -> None:
        folder, step = self.job.folder, self.state.step
        self._describe("running")
        self.observers.append(MetricsFile(folder / "metrics.jsonl", step))
        if self.run.track.tensorboard:
            self.observers.append(TensorBoard(folder / "tensorboard", step))
        self.observers.extend(observers)

    def _describe(self, word: str, reason: str | None = None) -> None:
        """Writes run.json as things stand."""
        more = {
            "state": word,
            "reason": reason,
            "resume": self.command if word == "stopped" else None,
            "result": {"step": self.state.step, "score": self.state.score, "seconds": self.state.seconds},
            "peak_memory_bytes": self.memory.read(),
        }
        write_run_file(self.job, steps=self.state.steps, device=self.device, processes=self.world.size, more=more)

    def _tell_start(self) -> None:
        info = {
            "name": self.run.name,
            "folder": str(self.job.folder),
            "step": self.state.step,
            "steps": self.state.steps,
            "tokens_per_step": self.run.train.batch * self.run.data.context,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "device": str(self.device),
        }
        for observer in self.observers:
            observer.start(info)

    def _tell(self, record: Record) -> None:
        for observer in self.observers:
            observer.record(record)

    def _steps(self) -> None:
        state = self.state
        while True:
            stopping = bool(self.world.any(int(self.stop.signum is not None)))
            if state.step and not stopping:
                self._look()
            if stopping or state.step >= state.steps:
                break
            self._step()
        if state.step and self.saved != state.step:
            self._save(best=False)

    def _host_batch(self, step: int) -> Batch:
        return self.data.batch(step, self.share)

    def _batches(self, batch: Batch) -> list[Batch]:
        return [part.to(self.device) for part in batch.micro(self.run.rows_per_forward())]

    def _step(self) -> None:
        state, run = self.state, self.run
        begin = time.perf_counter()
        share_of_peak = ratio(run.schedule, state.step, state.steps)
        batch = self._host_batch(state.step)
        batches = self._batches(batch)
        try:
            result = train_step(
                self.forward,
                batches,
                self.optimizer,
                ratio=share_of_peak,
                clip=run.train.clip,
                precision=run.train.precision,
                world=self.world,
            )
        except Diverged as error:
            raise self._diverged(error, batch, batches) from None
        seconds = time.perf_counter() - begin
        state.step += 1
        state.tokens += result.n_targets
        state.seconds += seconds
        if self.observers:
            self._tell(
                {
                    "kind": "train",
                    "step": state.step,
                    "loss": result.loss,
                    "lr": run.optimizer.lr * share_of_peak,
                    "grad_norm": result.grad_norm,
                    "targets": result.n_targets,
                    "tokens": state.tokens,
                    "tokens_per_second": result.n_targets / seconds,
                    "seconds": state.seconds,
                    "batch": fingerprint(batch),
                    **result.routing,
                }
            )

    def _diverged(self, error: Diverged, whole: Batch, batches: list[Batch]) -> Diverged:
        step, mark = self.state.step + 1, fingerprint(whole)
        starts = self.data.starts(self.state.step)[self.share].tolist()
        self._tell({"kind": "diverged", "step": step, "batch": mark, "starts": starts, "got": str(error.got)})
        site = None
        with evaluating(self.model), precision_context(self.run.train.precision, self.device):
            for batch in batches:
                site = site or self.model.trace_nonfinite(batch.tokens, padding=batch.padding, segments=batch.segments)
        last = states.latest(self.job.checkpoints)
        shown = ", ".join(map(str, starts[:4])) + (", …" if len(starts) > 4 else "")
        where = f"step {step}, batch {mark}, rows from tokens {shown} of the training text"
        return Diverged(
            error.what,
            where=where,
            got=str(error.got) + (f"; first at {site}" if site else ""),
            remedy="lower optimizer.lr, lengthen schedule.warmup or set train.clip; the last good checkpoint is "
            + (str(last) if last else "none, since none was saved yet"),
        )

    def _look(self) -> None:
        """Evaluation, sample and checkpoint, where they are due at this step and not done yet."""
        state, train = self.state, self.run.train
        end = state.step == state.steps
        due = {
            what: end or state.step % self._every(asked) == 0
            for what, asked in (
                ("evaluate", train.evaluate_every),
                ("sample", train.sample_every or train.evaluate_every),
                ("save", train.checkpoint_every or train.evaluate_every),
            )
        }
        better = False
        if due["evaluate"] and state.evaluated != state.step:
            better = self._evaluate()
        if due["sample"] and state.sampled != state.step and not self._asked_to_stop():
            self._sample()
        if better or (due["save"] and self.saved != state.step):
            self._save(best=better)

    def _evaluate(self) -> bool:
        """Scores the validation split; whether it is the best so far."""
        state, run, split = self.state, self.run, self.job.corpus.val
        if split.n_tokens < 2:
            state.evaluated = state.step
            return False
        begin = now(self.device)
        score = evaluate_split(
            self.model,
            split,
            context=run.data.context,
            documents=run.data.packing == "documents",
            rows=run.rows_per_forward(),
            precision=run.train.precision,
            world=self.world,
            abandon=self._asked_to_stop,
        )
        if score is None:  # a stop was asked for; the resumed run evaluates this step first
            return False
        state.evaluated, state.score = state.step, score.to_dict()
        seconds = now(self.device) - begin
        self._tell({"kind": "eval", "step": state.step, **state.score, "evaluation_seconds": seconds})
        if not math.isfinite(score.loss):
            last = states.latest(self.job.checkpoints)
            raise Diverged(
                "the validation loss is not a finite number",
                where=f"step {state.step}",
                got=score.loss,
                remedy=f"lower optimizer.lr; the last good checkpoint is {last or 'none, since none was saved yet'}",
            )
        if state.best_loss is not None and score.loss >= state.best_loss:
            return False
        state.best_loss, state.best_step = score.loss, state.step
        return True

    def _asked_to_stop(self) -> bool:
        """Whether a long evaluation should give way; several processes would have to agree at every batch."""
        return self.world.size == 1 and self.stop.signum is not None

    def _sample(self) -> None:
        state, asked = self.state, self.run.sample
        state.sampled = state.step
        if not asked.prompts or self.world.rank:
            return
        settings = Sampling(max_new_tokens=asked.max_new_tokens, temperature=asked.temperature, seed=self.run.seed)
        with evaluating(self.model):
            texts = generate(self.model, self.job.corpus.tokenizer, list(asked.prompts), settings)
        for prompt, completion in zip(asked.prompts, texts, strict=True):
            self._tell({"kind": "sample", "step": state.step, "prompt": prompt, "text": completion.text})

    def _save(self, *, best: bool) -> None:
        state, checkpoints = self.state, self.job.checkpoints
        random = self.world.gather(states.random_state(self.device).to(self.device)).cpu()
        self.saved = state.step
        if self.world.rank:
            return
        folder = states.save(
            checkpoints,
            state,
            model=self.model,
            tokenizer=self.job.corpus.tokenizer,
            optimizer=self.optimizer,
            random=random,
        )
        states.point(checkpoints, "last", folder)
        if best or state.best_step is None:
            states.point(checkpoints, "best", folder)
        states.prune(checkpoints, self.run.train.keep, state.best_step)
        path = str(folder.relative_to(self.job.folder))
        self._tell({"kind": "checkpoint", "step": state.step, "path": path, "best": best})

    def _result(self) -> Result:
        state = self.state
        return Result(
            folder=self.job.folder,
            step=state.step,
            steps=state.steps,
            finished=state.step >= state.steps and state.evaluated == state.step,
            signum=self.stop.signum,
            score=None if state.score is None else Score.from_dict(state.score),
            best_step=state.best_step,
            best_loss=state.best_loss,
            tokens=state.tokens,
            seconds=state.seconds,
        )
