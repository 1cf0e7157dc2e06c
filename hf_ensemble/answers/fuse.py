"""Fuse: another model reads the best candidates and writes the answer.

Reference:
    Jiang, Ren and Lin, "LLM-Blender: Ensembling Large Language Models with Pairwise Ranking and Generative Fusion"
    (https://arxiv.org/abs/2306.02561).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from typing_extensions import Self

from ..config import METHODS, check_option, check_positive_integer, method_config
from ..errors import ConfigurationError
from ..offers import Offer
from .base import AnswersConfig, Choice, Panel, Question
from .fusers import Fuser, check_template
from .rerank import RerankConfig


@dataclass(frozen=True)
class FuseConfig(AnswersConfig):
    """Fuse: a model reads the prompt and the best candidates and writes the answer, which is returned unchanged.

    Reference:
        Jiang, Ren and Lin, "LLM-Blender: Ensembling Large Language Models with Pairwise Ranking and Generative Fusion"
        (https://arxiv.org/abs/2306.02561).

    Relations:
        The only way of choosing that can return a text no member wrote.
    """

    name: ClassVar[str] = "fuse"

    model: str | Fuser
    """Hub id or path of the model that writes: sequence-to-sequence in the format of LLM-Blender's GenFuser, or a
    causal language model; or a `Fuser`, which also sets how it is loaded and how much it reads.
    """

    ranker: AnswersConfig = field(default_factory=RerankConfig)
    """How candidates are ranked first: `RerankConfig`, `VoteConfig` or `MbrConfig`."""

    top: int = 3
    """Number of best candidates that the model reads."""

    template: str | None = None
    """The input of a causal model, with `{prompt}` and `{answers}` in it. None: a plain request for one best answer.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        is_model = isinstance(self.model, Fuser) or (isinstance(self.model, str) and self.model != "")
        check_option("model", self.model, is_model, "a Hub id, a path or a `Fuser`")
        if isinstance(self.ranker, str):
            object.__setattr__(self, "ranker", method_config(self.ranker))
        is_ranker = isinstance(self.ranker, AnswersConfig) and not isinstance(self.ranker, FuseConfig)
        check_option("ranker", self.ranker, is_ranker, "a `RerankConfig`, `VoteConfig` or `MbrConfig`")
        check_positive_integer("top", self.top)
        ranker = self.ranker
        if ranker.num_candidates != 1 or ranker.methods or ranker.generate_options:
            raise ConfigurationError(
                "`ranker` only ranks the candidates of the `FuseConfig`: pass `num_candidates`, `methods` and "
                "`generate_options` to the `FuseConfig`."
            )
        if self.template is not None:
            check_template(self.template)

    def read_saved(self, option: str, value: dict[str, Any]) -> Any:
        """Read the ranker too; see `AnswersConfig.read_saved`."""
        if option == "model":
            return Fuser.from_dict(value)
        return method_config(value) if option == "ranker" else super().read_saved(option, value)

    @property
    def asks(self) -> frozenset[Offer]:
        """What the ranker asks for too."""
        return super().asks | self.ranker.asks

    @property
    def returns_one(self) -> bool:
        """Whether it returns a single answer, whatever the number of candidates."""
        return True

    def with_paths(self, change: Callable[[str], str]) -> Self:
        """Return the same options with other paths of the fuser and the ranker's judge; see `MethodConfig.with_paths`."""
        changed = super().with_paths(change)
        return replace(changed, model=change(self.model)) if isinstance(self.model, str) else changed

    @property
    def models(self) -> tuple[str, ...]:
        """Hub ids and paths of models that are loaded beside the members."""
        return (self._fuser.path, *self.ranker.models)

    @property
    def _fuser(self) -> Fuser:
        fuser = self.model if isinstance(self.model, Fuser) else Fuser(self.model)
        return fuser if self.template is None else replace(fuser, template=self.template)

    def load(self, panel: Panel) -> None:
        """Load the fuser and the ranker's judge; see `AnswersConfig.load`."""
        panel.loaded(self._fuser, self._fuser.load)
        self.ranker.load(panel)

    def choose(self, questions: Sequence[Question], panel: Panel) -> list[Choice]:
        """Rank, and let the model write; see `AnswersConfig.choose`."""
        fuser = panel.loaded(self._fuser, self._fuser.load)
        choices = self.ranker.choose(questions, panel)
        best = [
            [question.texts[number] for number in choice.ranking[: self.top]]
            for question, choice in zip(questions, choices, strict=True)
        ]
        texts = fuser.write([question.turns for question in questions], best, dict(panel.generate_options))
        return [replace(choice, written=text) for choice, text in zip(choices, texts, strict=True)]


METHODS[FuseConfig.name] = FuseConfig
