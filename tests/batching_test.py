"""Batches of like lengths: which rows they take, how rows are filled up, what an epoch has."""

import numpy as np
import pytest

from txl_tf.data.batching import EpochBatches, by_length, in_order, next_power_of_two, padded, shuffled


def rows_of(*arguments):
    return [rows.tolist() for rows in by_length(*arguments)]


def test_rows_of_like_lengths_are_together_in_their_order():
    assert rows_of([3, 1, 3, 2, 1], 2) == [[1, 4], [3, 0], [2]]
    assert rows_of([3, 1, 3, 2, 1], 10) == [[1, 4, 3, 0, 2]]
    assert rows_of(np.array([], int), 2) == []


def test_later_lengths_order_what_is_alike_in_earlier_ones():
    assert rows_of([[1, 1, 0, 1], [5, 4, 9, 4], [0, 2, 0, 1]], 4) == [[2, 3, 1, 0]]


def test_a_function_says_how_many_rows_fit_and_at_least_one_does():
    lengths = np.array([1, 2, 3, 4, 9])
    found = rows_of(-lengths, lambda left: 6 // lengths[left[0]])
    assert found == [[4], [3], [2, 1], [0]]


def test_sizes_are_rounded_up_to_powers_of_two():
    assert [next_power_of_two(n) for n in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]
    assert [next_power_of_two(n, 16) for n in (0, 1, 16, 17)] == [16, 16, 16, 32]


def test_answers_are_in_the_order_of_the_items():
    asked, items = [], ["ccc", "a", "bbb", "", "dd"]

    def upper(batch):
        asked.append(batch)
        return [item.upper() for item in batch]

    found = in_order(upper, items, by_length([len(item) for item in items], 2))
    assert found == ["CCC", "A", "BBB", "", "DD"] and asked == [["", "a"], ["dd", "ccc"], ["bbb"]]
    assert in_order(upper, [], by_length(np.array([], int), 2)) == []


def test_rows_are_filled_up_with_zeros():
    rows = [np.array([5]), np.array([6, 7, 8], np.int64)]
    assert padded(rows).tolist() == [[5, 0, 0], [6, 7, 8]] and padded(rows).dtype == np.int32
    assert padded(rows, multiple=3, width=4).tolist() == [[5, 0, 0, 0], [6, 7, 8, 0], [0, 0, 0, 0]]
    assert padded([]).shape == (0, 0)


@pytest.mark.parametrize("seed", [None, 7])
def test_every_epoch_has_every_row_and_a_seed_gives_its_own_order(seed):
    def cut(rng):
        return shuffled([np.array(rows) for rows in ([0], [1, 2], [3], [4, 5], [6])], rng)

    def collate(rows):
        return {"b": padded([rows]), "a": (padded([rows + 1]), rows.astype(np.int32))}

    batches = EpochBatches(cut, collate, seed)
    epochs = [[batches.rows(5 * epoch + i).tolist() for i in range(5)] for epoch in range(3)]
    assert all(sorted(sum(epoch, [])) == list(range(7)) for epoch in epochs)
    assert (epochs[0] == epochs[1]) == (seed is None) and epochs[0] == [batches.rows(i).tolist() for i in range(5)]
    read = list(batches.dataset(3, repeat=True).take(8).as_numpy_iterator())
    for step, found in enumerate(read, 3):
        rows = batches.rows(step)
        np.testing.assert_array_equal(found["b"], [rows])
        np.testing.assert_array_equal(found["a"][0], [rows + 1])
        np.testing.assert_array_equal(found["a"][1], rows)
    assert len(list(batches.dataset())) == len(batches) == 5
