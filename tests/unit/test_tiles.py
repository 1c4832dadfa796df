"""Tiles are packed so that what a position gets depends on its position alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwire.tiles import EXTENT_STEP, PackedTile, Tile, TileRow, extent_class, extents_up_to


def rows_of(windows: Sequence[tuple[int, int]]) -> list[TileRow]:
    """windows: (length of the sequence, rows of its window)."""
    return [
        TileRow(owner, index, length + index) for owner, (length, width) in enumerate(windows) for index in range(width)
    ]


def shape(tiles: Sequence[PackedTile]) -> list[tuple[int, list[tuple[int, int]]]]:
    return [(tile.extent, [(row.owner, row.index) for row in tile.rows]) for tile in tiles]


@pytest.mark.parametrize(
    ("positions", "keys"),
    [
        (1, 256),
        (256, 256),
        (257, 512),
        (1024, 1024),
        (1025, 1536),
        (1537, 2048),
        (2049, 3072),
        (3073, 4096),
        (8192, 8192),
    ],
)
def test_the_number_of_keys_follows_from_the_position(positions: int, keys: int) -> None:
    assert extent_class(positions) == keys


@given(st.integers(1, 200_000))
def test_keys_cover_the_position_and_are_at_most_half_too_many(positions: int) -> None:
    keys = extent_class(positions)
    assert positions <= keys <= max(EXTENT_STEP, 1.5 * positions + EXTENT_STEP)
    assert keys % EXTENT_STEP == 0
    assert extent_class(keys) == keys
    assert keys in extents_up_to(keys)


@pytest.mark.parametrize(("live", "share"), [(0, 8), (1, 8), (2, 4), (3, 2), (4, 2), (5, 1), (8, 1), (9, 1), (30, 1)])
def test_a_share_lets_all_fit_in_one_forward_while_they_can(live: int, share: int) -> None:
    assert Tile(rows=8).share(live) == share


def test_rows_that_fit_share_one_forward() -> None:
    tiles = Tile(rows=8).pack(rows_of([(10, 3), (20, 1), (99, 4)]))
    assert shape(tiles) == [(256, [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (2, 2), (2, 3)])]


def test_more_rows_than_a_tile_has_take_more_forwards() -> None:
    tile = Tile(rows=4)
    tiles = tile.pack(rows_of([(10, 3), (20, 3), (30, 3)]))
    assert [len(one.rows) for one in tiles] == [4, 4, 1]
    assert tile.forwards(9) == 3


def test_a_window_over_a_step_of_keys_is_cut_there() -> None:
    """Row 1 at position 256 looks at 512 keys, whichever window it is in."""
    assert shape(Tile(rows=8).pack(rows_of([(254, 4)]))) == [(256, [(0, 0), (0, 1)]), (512, [(0, 2), (0, 3)])]


def test_numbers_of_keys_that_give_the_same_bits_share_a_forward() -> None:
    tile = Tile(rows=8, runs=((256, 512, 768), (1536, 2048)))
    tiles = tile.pack(rows_of([(254, 4), (600, 2), (1000, 1), (1600, 1)]))
    assert shape(tiles) == [
        (768, [(1, 0), (1, 1), (0, 0), (0, 1), (0, 2), (0, 3)]),
        (1024, [(2, 0)]),
        (2048, [(3, 0)]),
    ]


@given(
    windows=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 20)), min_size=1, max_size=9),
    size=st.sampled_from([4, 8]),
    runs=st.sampled_from([(), ((256, 512),), ((256, 512, 768, 1024), (1536, 2048))]),
)
def test_every_row_comes_once_after_those_before_it_with_keys_of_its_own_bits(
    windows: list[tuple[int, int]], size: int, runs: tuple[tuple[int, ...], ...]
) -> None:
    rows = rows_of(windows)
    tiles = Tile(rows=size, runs=runs).pack(rows)
    packed = [row for tile in tiles for row in tile.rows]
    assert sorted(packed, key=lambda row: (row.owner, row.index)) == rows
    for owner in range(len(windows)):
        assert [row.index for row in packed if row.owner == owner] == list(range(windows[owner][1]))
    for tile in tiles:
        assert 0 < len(tile.rows) <= size
        for row in tile.rows:
            own = extent_class(row.position + 1)
            assert own == tile.extent or any(own in run and tile.extent in run for run in runs)
            assert row.position < tile.extent
