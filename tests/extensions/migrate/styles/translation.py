from argparse import ArgumentParser
from time import time

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

PAD = 0


class Translator(nn.Module):
    def __init__(self, vocab, size):
        super().__init__()
        self.src_embedding = nn.Embedding(vocab, size)
        self.tgt_embedding = nn.Embedding(vocab, size)
        self.rnn = nn.GRU(size, size, batch_first=True)
        self.ff = nn.Linear(size, vocab)

    def forward(self, src, tgt):
        _, memory = self.rnn(self.src_embedding(src))
        return self.ff(self.rnn(self.tgt_embedding(tgt), memory)[0])


def collate_fn(batch):
    sources, targets = zip(*batch)
    return pad_sequence(sources, batch_first=True), pad_sequence(targets, batch_first=True)


def make_pairs(count, start):
    lengths = [3 + (start + i) % 4 for i in range(count)]
    return [(torch.arange(n) % 7 + 1, torch.arange(n + 1) % 5 + 1) for n in lengths]


def train(model, train_dl, loss_fn, optim, device):
    losses = 0
    model.train()
    for src, tgt in train_dl:
        src = src.to(device)
        tgt = tgt.to(device)
        tgt_input = tgt[:, :-1]
        logits = model(src, tgt_input)
        optim.zero_grad()
        tgt_out = tgt[:, 1:]
        loss = loss_fn(logits.reshape(-1, logits.shape[-1]), tgt_out.reshape(-1))
        loss.backward()
        optim.step()
        losses += loss.item()
    return losses / len(list(train_dl))


def validate(model, valid_dl, loss_fn, device):
    losses = 0
    model.eval()
    with torch.no_grad():
        for src, tgt in valid_dl:
            src = src.to(device)
            tgt = tgt.to(device)
            logits = model(src, tgt[:, :-1])
            tgt_out = tgt[:, 1:]
            loss = loss_fn(logits.reshape(-1, logits.shape[-1]), tgt_out.reshape(-1))
            losses += loss.item()
    return losses / len(list(valid_dl))


def main(opts):
    torch.manual_seed(0)
    train_dl = DataLoader(make_pairs(48, 0), batch_size=opts.batch, collate_fn=collate_fn, shuffle=True)
    valid_dl = DataLoader(make_pairs(12, 1), batch_size=opts.batch, collate_fn=collate_fn)
    model = Translator(9, 12).to(DEVICE)
    loss_fn = torch.nn.CrossEntropyLoss(ignore_index=PAD)
    optim = torch.optim.Adam(model.parameters(), lr=opts.lr, betas=(0.9, 0.98), eps=1e-9)
    lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optim)
    best_val_loss = 1e6
    for idx, epoch in enumerate(range(1, opts.epochs + 1)):
        start_time = time()
        train_loss = train(model, train_dl, loss_fn, optim, DEVICE)
        val_loss = validate(model, valid_dl, loss_fn, DEVICE)
        lr_scheduler.step(val_loss)
        if val_loss < best_val_loss:
            best_val_loss = val_loss
            print("New best model, saving...")
            torch.save(model.state_dict(), "best.pt")
        torch.save(model.state_dict(), "last.pt")
        print(f"Epoch: {epoch}\n\tTrain loss: {train_loss:.6f}\n\tVal loss: {val_loss:.6f}")
    torch.save(model.state_dict(), "weights.pt")


if __name__ == "__main__":
    DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser = ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()
    main(args)
