"""What was asked: traces, their format, importers, synthesis and description."""

from replay.trace.format import read, write
from replay.trace.model import Header, Ref, Trace, Turn
from replay.trace.tree import ROOT, BlockIds, PrefixTree, Tip

__all__ = ["ROOT", "BlockIds", "Header", "PrefixTree", "Ref", "Tip", "Trace", "Turn", "read", "write"]
