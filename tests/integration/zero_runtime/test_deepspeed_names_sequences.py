"""``deepspeed.sequence.cross_entropy``: losses and gradients of sharded sequences equal those of whole sequences."""

from __future__ import annotations

import pytest
import torch

from support.ranks import run_ranks

SEQUENCE, BATCH, WORDS = 8, 3, 10


def whole():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(SEQUENCE, BATCH, WORDS, generator=generator)
    target = torch.randint(WORDS, (SEQUENCE, BATCH), generator=generator)
    target[1, 2] = -100
    return logits.requires_grad_(), target


def losses_of_pieces(rank, world, shares_words):
    import zero_runtime

    zero_runtime.as_deepspeed()
    from deepspeed import comm as dist
    from deepspeed.sequence.cross_entropy import vocab_sequence_parallel_cross_entropy

    group, alone = dist.new_group(list(range(world))), [dist.new_group([each]) for each in range(world)][rank]
    logits, target = whole()
    rows = slice(None) if shares_words else slice(rank * SEQUENCE // world, (rank + 1) * SEQUENCE // world)
    columns = slice(rank * WORDS // world, (rank + 1) * WORDS // world) if shares_words else slice(None)
    piece = logits.detach()[rows, :, columns].requires_grad_()
    groups = (alone, group) if shares_words else (group, None)
    losses = vocab_sequence_parallel_cross_entropy(piece, target[rows], *groups)
    losses.square().sum().backward()
    with pytest.raises(NotImplementedError, match="reduction 'mean'"):
        vocab_sequence_parallel_cross_entropy(piece, target[rows], *groups, reduction="mean")
    with pytest.raises(RuntimeError, match="expected"):
        vocab_sequence_parallel_cross_entropy(piece, target, *groups) if not shares_words else (
            vocab_sequence_parallel_cross_entropy(piece, target[1:], *groups)
        )
    return losses.detach().tolist(), piece.grad.tolist()


@pytest.mark.parametrize("shares_words", [False, True], ids=["sequences", "words"])
def test_losses_of_shared_sequences(shares_words):
    logits, target = whole()
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    wanted = wanted.view_as(target)
    wanted.square().sum().backward()
    found = run_ranks(2, losses_of_pieces, shares_words)
    for losses, _ in found:
        torch.testing.assert_close(torch.tensor(losses), wanted.detach())
    gradient = torch.cat([torch.tensor(each) for _, each in found], dim=2 if shares_words else 0)
    torch.testing.assert_close(gradient, logits.grad)
