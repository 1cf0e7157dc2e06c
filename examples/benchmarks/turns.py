"""Taking turns: after every fused step each member takes a step by itself, so that all meet the same machine."""

import time
from collections.abc import Callable

import torch
from measure import synchronize
from transformers import StoppingCriteria


def clock_of(device: torch.device) -> Callable[[], float]:
    """What gives seconds: on a CPU those of the processor, which other work of the machine hardly changes."""
    return time.process_time if device.type == "cpu" else time.perf_counter


class OwnLoop:
    """A member decoding greedily by itself, one step at a time, with its stock cache and the stock loop's calls."""

    def __init__(self, model, input_ids: torch.Tensor, replayed: torch.Tensor | None = None):
        self._model = model
        self._replayed = replayed
        self.clock = clock_of(model.device)
        self._steps = self._decode(input_ids.to(model.device))

    def step(self) -> float:
        """Decode one token and return the seconds it took."""
        start = self.clock()
        next(self._steps)
        return self.clock() - start

    @torch.no_grad()
    def _decode(self, ids: torch.Tensor):
        kwargs = {"use_cache": True, "position_ids": torch.arange(ids.shape[1], device=ids.device)[None]}
        num_new = ids.shape[1]
        while True:
            inputs = self._model.prepare_inputs_for_generation(ids, next_sequence_length=num_new, **kwargs)
            output = self._model(**inputs, logits_to_keep=1)
            kwargs = self._model._update_model_kwargs_for_generation(output, kwargs)
            chosen = output.logits[:, -1].float().argmax(-1, keepdim=True)
            chosen[0, -1].item()
            if self._replayed is not None:
                chosen = self._replayed[None, ids.shape[1], None]
            ids = torch.cat([ids, chosen], dim=-1)
            num_new = 1
            yield


class TakeTurns(StoppingCriteria):
    """Between two fused steps lets each member do one of its own.

    Attributes:
        fused: Seconds of each fused step.
        own: Seconds of each member's own step, taken right after it.
    """

    def __init__(self, loops: list[OwnLoop], progress=None):
        self.loops, self.progress = loops, progress
        self.fused: list[float] = []
        self.own: list[list[float]] = []
        self._clock = loops[0].clock if loops else time.perf_counter
        self._resumed = self._clock()

    def __call__(self, input_ids, scores, **kwargs):
        synchronize()
        self.fused.append(self._clock() - self._resumed)
        self.own.append([loop.step() for loop in self.loops])
        if self.progress is not None:
            self.progress.update()
        self._resumed = self._clock()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
