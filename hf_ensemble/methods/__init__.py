"""The methods: one per file, with its options. Importing a file here registers its method's name."""

from .deepen import DeepenConfig as DeepenConfig
from .eva import EvaConfig as EvaConfig
from .gac import Gac as Gac
from .gac import GacConfig as GacConfig
from .mined import MinedConfig as MinedConfig
from .sweetspan import SweetSpanConfig as SweetSpanConfig
from .unite import UniteConfig as UniteConfig
