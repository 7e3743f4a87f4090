# ruff: noqa: C901, PLR0912 - one script, in which each line may be the cause
"""A language model whose variable `CAUSE` changes one thing: tied weights, micro-batches, workers and states that change while it trains."""

import os

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

CAUSE = os.environ.get("CAUSE", "")
MICRO_BATCHES, STEPS = 2, 8


class Tokens(Dataset):
    def __init__(self):
        self.tokens = torch.randint(1, 20, (64, 7), generator=torch.Generator().manual_seed(1))
        self.tokens[::3, -2:] = 0

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        if CAUSE == "masked tokens" and index == 9:
            tokens = tokens.roll(1)
        noise = torch.rand(()) if os.environ.get("WORKERS") else torch.ones(())
        return tokens[:-1], tokens[1:], noise


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0 if CAUSE == "padding_idx" else None)
        self.mix = nn.GRU(8, 8, batch_first=True)
        self.norm = nn.LayerNorm(8, eps=1e-3 if CAUSE == "epsilon of a norm" else 1e-5)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 20, bias=False)
        if CAUSE == "untied weights":
            self.head.weight.data.copy_(self.embed.weight.data)
        else:
            self.head.weight = self.embed.weight

    def forward(self, tokens, scale):
        x, _ = self.mix(self.embed(tokens))
        if CAUSE == "recomputed activations":
            x = checkpoint(self.norm, x, use_reentrant=False)
        else:
            x = self.norm(x)
        return self.head(self.drop(x) * scale[:, None, None])


def main():
    torch.manual_seed(0)
    model = Model()
    if CAUSE == "frozen parameter":
        model.norm.bias.requires_grad_(False)
    betas = (0.9, 0.95) if CAUSE == "betas" else (0.9, 0.999)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.01, betas=betas, foreach=False if CAUSE == "loops for tensors" else None
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    generator = torch.Generator().manual_seed(3 if CAUSE == "seed of workers" else 2)
    workers = int(os.environ.get("WORKERS", "0"))
    loader = DataLoader(Tokens(), 4, num_workers=workers, generator=generator)
    criterion = nn.CrossEntropyLoss(
        ignore_index=0 if CAUSE == "ignored index" else -100,
        label_smoothing=0.1 if CAUSE == "label smoothing" else 0.0,
    )
    batches = iter(loader)
    for step in range(1, STEPS + 1):
        if CAUSE == "evaluation mode left on" and step == 4:
            model.eval()
        if CAUSE == "dropout while it trains" and step == 3:
            model.drop.p = 0.5
        count = 1 if CAUSE == "fewer micro-batches" and step == 3 else MICRO_BATCHES
        for number in range(count):
            tokens, targets, scale = next(batches)
            outputs = model(tokens=tokens, scale=scale)
            if CAUSE == "shifted targets" and step == 2 and number == 1:
                targets = targets.roll(1, 1)
            loss = criterion(outputs.flatten(0, 1), targets.flatten())
            if CAUSE != "divisor of micro-batches":
                loss = loss / MICRO_BATCHES
            loss.backward()
        if CAUSE == "lost gradient" and step == 5:
            model.norm.weight.grad = None
        if CAUSE == "NaN" and step == 4:
            model.norm.bias.grad[0] = float("nan")
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if CAUSE == "gradient after clipping" and step == 6:
            model.embed.weight.grad *= 2
        if not (CAUSE == "skipped step" and step == 5) and not norm.isnan():
            optimizer.step()
        schedule.step()
        if CAUSE == "scheduler twice" and step == 2:
            schedule.step()
        if CAUSE == "weights in bf16" and step == 4:
            model.mix.weight_hh_l0.data = model.mix.weight_hh_l0.data.bfloat16().float()
        if CAUSE == "state of the optimizer" and step == 3:
            optimizer.state[model.norm.weight]["exp_avg"].zero_()
        optimizer.zero_grad(set_to_none=CAUSE != "zeroed gradients")


main()
