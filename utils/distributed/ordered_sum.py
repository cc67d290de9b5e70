"""A sum over processes in the order of their rows, which sends little between nodes.

Floating-point sums depend on the order of their terms. Added always in the same order, the same
rows give the same bits on any number of processes. The processes of a node share the columns out:

    within a node    each process gets its part of the columns from all others of its node
    between nodes    the processes with the same part form a chain, node by node: each adds the rows
                     of its node to the sum that comes from the node before, and sends it to the
                     next one; the last one sends the whole sum back, from node to node
    within a node    each process sends its part of the sum to all others of its node

So every node sends the next one n numbers, and the node before as many, however many processes it
has. A chain sends its part in chunks, so that all its links work at the same time, in both
directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

# A chain of m nodes takes CHUNKS + 2 m - 3 turns, each of which costs the latency of a link and the
# time for a chunk (but for gloo, see _by_gloo in exchange.py). More chunks leave a long chain idle
# for less of the time, and fewer wait less often for the latency.
CHUNKS = 16
LEAST_CHUNK = 1 << 16  # bytes; smaller ones would take hardly less time

Message = tuple[Tensor, int]  # what is sent or received, and the rank of the other process


class Step(NamedTuple):
    """Messages that are exchanged at the same time.

    Attributes:
        sent, received: some may be empty tensors.
        then: called when all has been received; None: no later step needs what is received in this
            one.
    """

    sent: list[Message]
    received: list[Message]
    then: Callable[[], None] | None = None


# Exchanges messages with other processes, step by step, and returns when all have been received.
CarryOut = Callable[[list[Step]], None]


def node_size(local_ranks: Sequence[int]) -> int:
    """The number of processes on each node, given each rank's number among those of its node. It is
    1, as if each process had a node of its own, unless the ranks are numbered node by node and all
    nodes have equally many."""
    size = max(local_ranks) + 1
    nodes, rest = divmod(len(local_ranks), size)
    return size if rest == 0 and list(local_ranks) == [*range(size)] * nodes else 1


def sum_rows(
    rows: Tensor, counts: Sequence[int], rank: int, size: int, carry_out: CarryOut
) -> Tensor:
    """See `Exchange.sum_rows`.

    Args:
        rows: (this process's count, n).
        counts: rows of each process.
        rank: of this process.
        size: processes of each node; the first node has the first `size` ranks.
    """
    node = rank // size
    members = range(node * size, (node + 1) * size)
    others = [other for other in members if other != rank]
    columns = dict(zip(members, parts(rows.shape[1], size), strict=True))  # of each process
    mine = columns[rank]
    of_node = {
        member: rows[:, mine]
        if member == rank
        else rows.new_empty(counts[member], mine.stop - mine.start)
        for member in members
    }
    to_others = [(rows[:, columns[other]].contiguous(), other) for other in others]
    carry_out([Step(to_others, [(of_node[other], other) for other in others])])
    total = rows.new_empty(rows.shape[1])
    in_order = [row for member in members for row in of_node[member]]
    _add_along_chain(total[mine], in_order, rank, size, len(counts), carry_out)
    to_others = [(total[mine], other) for other in others]
    carry_out([Step(to_others, [(total[columns[other]], other) for other in others])])
    return total


def _add_along_chain(
    total: Tensor, rows: list[Tensor], rank: int, size: int, ranks: int, carry_out: CarryOut
) -> None:
    """Overwrites `total`, (n,), by the sum of the rows, (n,), of all nodes."""
    node, nodes = rank // size, ranks // size
    if node == 0:
        total.copy_(rows[0])
        for row in rows[1:]:
            total += row
    if nodes == 1:
        return
    chunks = parts(len(total), chunk_count(total.nbytes))

    def messages(ahead: int | None, back: int | None) -> list[Message]:
        pairs = ((ahead, rank + size), (back, rank - size))
        return [(total[chunks[chunk]], other) for chunk, other in pairs if chunk is not None]

    def add(number: int | None) -> None:
        for row in rows if number is not None else ():
            total[chunks[number]] += row[chunks[number]]  # type: ignore[index]  # not None

    carry_out(
        [
            Step(
                messages(turn.send_ahead, turn.send_back),
                messages(turn.from_ahead, turn.from_back),
                partial(add, turn.from_back) if node > 0 else None,
            )
            for turn in turns(node, nodes, len(chunks))
        ]
    )


class Turn(NamedTuple):
    """The chunks, by number, that a node sends and receives at the same time; None: none.

    Attributes:
        from_back, send_ahead: of the unfinished sum, from the node before and to the next one.
        from_ahead, send_back: of the whole sum, from the next node and to the one before.
    """

    from_back: int | None
    send_ahead: int | None
    from_ahead: int | None
    send_back: int | None


def turns(node: int, nodes: int, chunks: int) -> Iterator[Turn]:
    """What a node of a chain of 2 or more does, turn by turn. A chunk moves on by one node in every
    turn: to the last node, and from there back to the first one. What one sends in a turn, its
    neighbour receives in the same turn."""
    last = nodes - 1
    first, ends = node == 0, node == last
    begins_back = 2 * last - node  # the turn in which this node sends the first chunk back

    def chunk(number: int, never: bool) -> int | None:
        return number if 0 <= number < chunks and not never else None

    for turn in range(chunks + 2 * last - 1):
        yield Turn(
            from_back=chunk(turn - node + 1, first),
            send_ahead=chunk(turn - node, ends),
            from_ahead=chunk(turn - begins_back + 1, ends),
            send_back=chunk(turn - begins_back, first),
        )


def chunk_count(length: int) -> int:
    """The number of chunks in which a chain sends `length` bytes."""
    return max(1, min(CHUNKS, length // LEAST_CHUNK))


def parts(n: int, count: int) -> list[slice]:
    """Cuts [0, n) into `count` parts whose lengths differ by one at most; some may be empty."""
    return [slice(n * i // count, n * (i + 1) // count) for i in range(count)]
