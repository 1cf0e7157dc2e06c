"""Choosing among whole answers, one way a file with its options. A file that is imported here is known by its name."""

from .fuse import FuseConfig as FuseConfig
from .mbr import MbrConfig as MbrConfig
from .rerank import RerankConfig as RerankConfig
from .vote import VoteConfig as VoteConfig
