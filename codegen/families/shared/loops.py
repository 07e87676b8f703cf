"""The form of a loop over tiles of keys, of which a family's skeleton has one or more for each mask."""
from __future__ import annotations

from dataclasses import dataclass

RIGHT_TITLE = "tiles that the mask cuts on the right: masked"
END_TITLE = "the tile that the end of the keys cuts: masked"
WHOLE_TITLE = "tiles that every row sees whole"


@dataclass(frozen=True)
class KvLoop:
    title: str
    ends_at: str = ""               # a member of KvTiles, a variable or function of the skeleton, or its condition
    masks_every_tile: bool = False
    masks_cut_tiles: bool = False   # only tiles from full_end on are masked
    subtract: str = "row_ref"       # which subtract_... of softmax_lazy.cuh scores go through
    may_reach_end: bool = False     # behind this loop there may be no tiles left
    rows_started: bool = False      # every row that sees a key has seen one before this loop
