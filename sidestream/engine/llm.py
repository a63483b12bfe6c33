"""``LLM``: offline generation. A client of the engine core that adds text on both sides."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any

from sidestream.config.engine import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_MAX_FORM_SECONDS,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    EngineConfig,
)
from sidestream.core.outputs import RequestOutput
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.build import BuiltEngine, build_engine
from sidestream.engine.bundled import bundled_model as bundled_model
from sidestream.engine.core import EngineCore
from sidestream.engine.input_processor import InputProcessor, ProcessedPrompt, Prompt
from sidestream.engine.ledger import Ledger
from sidestream.engine.output_processor import OutputProcessor
from sidestream.engine.token_masks import masks_for
from sidestream.engine.tokenizer import load_tokenizer
from sidestream.engine.unfinished import Posted
from sidestream.errors import CheckpointError, RequestError, SidestreamError


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one completion while a batch of prompts runs."""

    prompt_index: int
    completion_index: int
    text: str
    num_tokens: int
    """Tokens of the completion so far."""
    output: RequestOutput
    """The request, live: it grows with the stream, and is final when ``output.finished``."""


class LLM:
    """A model, ready to generate. Several ``stream`` iterators may be open at once; one thread drives them.

    Args:
        model: folder of a hub checkpoint (config.json, safetensors files, a tokenizer if text is wanted); None is the
            small checkpoint that ships with Sidestream.
        device, dtype, load_format, max_num_seqs, max_num_batched_tokens, prefill_pacing, max_model_len, block_size,
            num_blocks, kv_cache_dtype, cudagraph_mode, max_capture_tokens, stream_policy, graph_debug, memory_limit,
            enable_prefix_caching, num_prefix_snapshots, prefix_snapshot_interval, hisparse_host_memory,
            hisparse_hot_factor, hisparse_watermark, hisparse_staged_tokens, max_form_seconds, seed: see
            ``EngineConfig``.
    Raises:
        ConfigError, CheckpointError, CapacityError: naming the value, the limit and the knob.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        load_format: str = "auto",
        max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
        max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS,
        prefill_pacing: bool | None = None,
        max_model_len: int | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        num_blocks: int | None = None,
        kv_cache_dtype: str = "auto",
        cudagraph_mode: str = "auto",
        max_capture_tokens: int | None = None,
        stream_policy: str = "auto",
        graph_debug: bool = False,
        memory_limit: int | float | str | None = None,
        enable_prefix_caching: bool = True,
        num_prefix_snapshots: int | None = None,
        prefix_snapshot_interval: int | None = None,
        hisparse_host_memory: int | float | str | None = None,
        hisparse_hot_factor: int = 2,
        hisparse_watermark: float = 0.125,
        hisparse_staged_tokens: int | None = None,
        max_form_seconds: float = DEFAULT_MAX_FORM_SECONDS,
        seed: int = 0,
    ) -> None:
        folder = _folder(model)
        self.built: BuiltEngine = build_engine(
            folder,
            EngineConfig(
                device=device,
                dtype=dtype,
                load_format=load_format,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                prefill_pacing=prefill_pacing,
                max_model_len=max_model_len,
                block_size=block_size,
                num_blocks=num_blocks,
                kv_cache_dtype=kv_cache_dtype,
                cudagraph_mode=cudagraph_mode,
                max_capture_tokens=max_capture_tokens,
                stream_policy=stream_policy,
                graph_debug=graph_debug,
                memory_limit=memory_limit,
                enable_prefix_caching=enable_prefix_caching,
                num_prefix_snapshots=num_prefix_snapshots,
                prefix_snapshot_interval=prefix_snapshot_interval,
                hisparse_host_memory=hisparse_host_memory,
                hisparse_hot_factor=hisparse_hot_factor,
                hisparse_watermark=hisparse_watermark,
                hisparse_staged_tokens=hisparse_staged_tokens,
                max_form_seconds=max_form_seconds,
                seed=seed,
            ),
        )
        config = self.built.config
        self.tokenizer: Any | None = load_tokenizer(folder)
        model_config = config.model
        masks = masks_for(
            self.tokenizer,
            vocab_size=model_config.vocab_size,
            eos_token_ids=model_config.eos_token_ids,
            max_form_seconds=config.max_form_seconds,
        )
        self.core = EngineCore(self.built, masks=masks)
        self._inputs = InputProcessor(
            config.model, self.tokenizer, max_model_len=self.built.max_model_len, seed=config.seed
        )
        self._outputs = OutputProcessor(self.tokenizer, config.model.eos_token_ids)
        self._ids = itertools.count()
        self._one_thread = threading.RLock()
        self._inboxes: dict[str, deque[Posted]] = {}
        self._left: deque[tuple[Iterable[str], list[ProcessedPrompt]]] = deque()

    def ledger(self) -> Ledger:
        """What the engine holds, part by part, beside the device's own figure; ``print`` shows a table."""
        return self.built.ledger_now()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all at once.

        Args:
            prompts: one prompt or several: text, token ids, or {"prompt" | "prompt_token_ids" | "messages": ...}.
            sampling_params: for all prompts, or one each; None is the defaults.
        Returns:
            One output a prompt, in order.
        Raises:
            RequestError: before anything runs, naming the prompt and what is wrong with it.
        """
        outputs: dict[int, RequestOutput] = {}
        for delta in self.stream(prompts, sampling_params):
            if delta.output.finished:
                outputs[delta.prompt_index] = delta.output
        return [outputs[index] for index in sorted(outputs)]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the checkpoint's chat template; one output a conversation."""
        one = not isinstance(messages, Sequence) or not messages or isinstance(messages[0], Mapping)
        conversations = [messages] if one else messages
        return self.generate([{"messages": conversation} for conversation in conversations], sampling_params)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[TextDelta]:
        """Like ``generate``, yielding progress as it is made; closing the iterator aborts the rest."""
        batch = self._process(prompts, sampling_params)
        return self._run(batch)

    def _process(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[ProcessedPrompt]:
        listed = _as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(listed)
        elif isinstance(sampling_params, Sequence) and not isinstance(sampling_params, str):
            params = list(sampling_params)
        else:
            raise RequestError(f"sampling parameters must be SamplingParams, got {type(sampling_params).__name__}")
        if len(params) != len(listed):
            raise RequestError(f"{len(params)} sampling parameters for {len(listed)} prompts; give one, or one each")
        batch = []
        for index, (prompt, param) in enumerate(zip(listed, params, strict=True)):
            try:
                batch.append(self._inputs.process(str(next(self._ids)), prompt, param))
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}") from None
        return batch

    def _run(self, batch: list[ProcessedPrompt]) -> Iterator[TextDelta]:
        inbox: deque[Posted] = deque()
        place: dict[str, tuple[int, int]] = {}
        following: dict[int, RequestOutput] = {}
        shown: dict[str, int] = {}
        try:
            for index, prompt in enumerate(batch):
                following[index] = self._outputs.add(prompt)
                for completion, request in enumerate(prompt.requests):
                    place[request.request_id] = (index, completion)
                    shown[request.request_id] = 0
                    self._inboxes[request.request_id] = inbox
                    self._alone(partial(self.core.add, request))
            while following:
                while not inbox:
                    self._step()
                event = inbox.popleft().output
                if not self._outputs.follows(event.request_id):
                    continue
                if self._outputs.push(event):
                    self._end(event.request_id)
                index, completion = place[event.request_id]
                output = following[index]
                made = output.outputs[completion]
                text = made.text[shown[event.request_id] :]
                shown[event.request_id] = len(made.text)
                if output.finished:
                    self._outputs.forget(output.request_id)
                    del following[index]
                yield TextDelta(index, completion, text, len(made.token_ids), output)
        finally:
            self._left.append((place, batch))  # before an interrupt can come
            self._end_left()

    def _step(self) -> None:
        """Run one step and hand each output to the iterator whose request it is: several may be open at once. Outputs
        of requests that ended meanwhile are nobody's."""
        self._end_left()
        outbox = self.core.outbox  # not empty if an interrupt came between the last step and its delivery
        if not outbox:
            assert self.core.has_work(), f"requests {list(self._inboxes)} are awaited, and the engine has none left"
            self._alone(self.core.advance)
        while outbox:
            inbox = self._inboxes.get(outbox[0].output.request_id, deque())
            inbox.extend(islice(iter(outbox.popleft, None), 1))  # one call, so that no interrupt comes within

    def _alone(self, work: Callable[[], None]) -> None:
        """Change the engine, unless another thread does."""
        if not self._one_thread.acquire(blocking=False):
            raise SidestreamError("another thread is running a step of this LLM; one thread must drive it")
        try:
            work()
        finally:
            self._one_thread.release()

    def _end_left(self) -> None:
        """End what iterators that are closed have left; what an interrupt leaves of that ends the next time."""
        while self._left:
            request_ids, prompts = left = self._left[0]
            for request_id in request_ids:
                self._end(request_id)
            for prompt in prompts:
                self._outputs.abort(prompt.request_id)
                self._outputs.forget(prompt.request_id)
            with contextlib.suppress(ValueError):  # an iterator that was collected meanwhile ended this one too
                self._left.remove(left)

    def _end(self, request_id: str) -> None:
        """Drop a request that is done, or that nobody waits for any more."""
        self.core.abort(request_id)
        self._inboxes.pop(request_id, None)


def _folder(model: str | os.PathLike[str] | None) -> Path:
    if model is None:
        return bundled_model()
    if not isinstance(model, str | os.PathLike) or not str(model):
        raise CheckpointError(f"model must name the folder of a hub checkpoint, got {model!r}")
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"model {str(folder)!r} is not a folder; give the folder of a hub checkpoint")
    return folder


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several; a list of integers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if hasattr(prompts, "tolist"):  # an array or a tensor
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise RequestError(f"prompts must be a prompt or a list of them, got {type(prompts).__name__}")
    listed: list[Any] = list(prompts)
    if not listed:
        raise RequestError("there are no prompts")
    if all(isinstance(item, Integral) for item in listed):
        return [listed]
    return listed
