"""The tensors of the pieces that a worker owns under its next plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from elaunch.workers.layers.shards import Shards, chunks_of
from elaunch.workers.state.boxes import Box
from elaunch.workers.state.chunks import Chunk, ChunkedState
from elaunch.workers.state.layout import ParameterPiece
from elaunch.workers.state.space import OPTIMIZER, Item


class Assembly:
    """Pieces that stay as they are keep their tensors; the others get new ones, made when they are first asked for.

    Args:
        pieces: in the order of the layout.
        local: what this worker has now, by piece; None: nothing, or not by piece.
        items: of the space.
        device: of the new tensors.
    """

    def __init__(
        self, pieces: Sequence[ParameterPiece], local: Shards | None, items: Mapping[str, Item], device: torch.device
    ) -> None:
        self._pieces, self._items, self._device = pieces, items, device
        wanted = {piece.shape for piece in pieces}
        self._stay = {
            piece.shape: local.tensors(place)
            for place, piece in enumerate(local.pieces if local is not None else ())
            if local is not None and piece.shape in wanted
        }
        self._by_box = {(piece.parameter + OPTIMIZER, box): piece for piece in pieces for box in piece.boxes}
        self._flats: dict[ParameterPiece, tuple[Tensor, ...]] = {}
        self._chunks: dict[ParameterPiece, dict[Box, Chunk]] = {}

    def allocate(self, name: str, box: Box) -> tuple[Tensor, ...]:
        """Returns new tensors for a box of an item."""
        return self._made(self._by_box[name, box])[box].tensors

    def chunks(self) -> dict[str, list[Chunk]]:
        """Returns the chunks of all pieces that do not stay, by item."""
        found: dict[str, list[Chunk]] = {}
        for piece in self._pieces:
            if piece.shape not in self._stay:
                found.setdefault(piece.parameter + OPTIMIZER, []).extend(self._made(piece).values())
        return found

    def tensors(self, state: ChunkedState | None = None) -> list[tuple[Tensor, ...]]:
        """Returns the tensors of all pieces, flat. Chunks of `state` that are not in their piece are copied there."""
        found = []
        for piece in self._pieces:
            stayed = self._stay.get(piece.shape)
            if stayed is not None and piece not in self._flats:
                self._flats[piece] = stayed
            elif state is not None:
                here = {chunk.box: chunk for chunk in state[piece.parameter + OPTIMIZER]}
                for box, chunk in self._made(piece).items():
                    if here[box].tensors[0].data_ptr() != chunk.tensors[0].data_ptr():
                        # It stayed where it was, in a longer or shorter piece.
                        for to, from_ in zip(chunk.tensors, here[box].tensors, strict=True):
                            to.copy_(from_)
            found.append(self._flats[piece])
        return found

    def _made(self, piece: ParameterPiece) -> dict[Box, Chunk]:
        if piece not in self._chunks:
            dtypes = self._items[piece.parameter + OPTIMIZER].dtypes
            flats = tuple(torch.empty(piece.elements, dtype=kind, device=self._device) for kind in dtypes)
            self._flats[piece] = flats
            self._chunks[piece] = {chunk.box: chunk for chunk in chunks_of(piece, flats)}
        return self._chunks[piece]
