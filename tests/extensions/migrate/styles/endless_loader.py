import argparse
import os
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torch.utils.data.dataloader import DataLoader


class Bigram(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.emb = nn.Embedding(vocab_size, 8)
        self.head = nn.Linear(8, vocab_size)

    def forward(self, idx, targets=None):
        logits = self.head(self.emb(idx))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


@torch.no_grad()
def generate(model, idx, max_new_tokens):
    for _ in range(max_new_tokens):
        logits, _ = model(idx)
        idx = torch.cat((idx, logits[:, -1, :].argmax(dim=-1, keepdim=True)), dim=1)
    return idx


def print_samples(num=2):
    X_init = torch.zeros(num, 1, dtype=torch.long).to(args.device)
    X_samp = generate(model, X_init, 4).to("cpu")
    for row in X_samp:
        print(row.tolist())


@torch.inference_mode()
def evaluate(model, dataset, batch_size=10, max_batches=None):
    model.eval()
    loader = DataLoader(dataset, shuffle=True, batch_size=batch_size, num_workers=0)
    losses = []
    for i, batch in enumerate(loader):
        batch = [t.to(args.device) for t in batch]
        X, Y = batch
        logits, loss = model(X, Y)
        losses.append(loss.item())
        if max_batches is not None and i >= max_batches:
            break
    mean_loss = torch.tensor(losses).mean().item()
    model.train()
    return mean_loss


class Words(Dataset):
    def __init__(self, words):
        self.words = words

    def __len__(self):
        return len(self.words)

    def __getitem__(self, idx):
        word = self.words[idx]
        return word[:-1], word[1:]


class InfiniteDataLoader:
    """This is really hacky and not proud of it."""

    def __init__(self, dataset, **kwargs):
        train_sampler = torch.utils.data.RandomSampler(dataset, replacement=True, num_samples=int(1e4))
        self.train_loader = DataLoader(dataset, sampler=train_sampler, **kwargs)
        self.data_iter = iter(self.train_loader)

    def next(self):
        try:
            batch = next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.train_loader)
            batch = next(self.data_iter)
        return batch


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--work-dir", "-o", type=str, default="out")
    parser.add_argument("--max-steps", type=int, default=12)
    parser.add_argument("--device", type=str, default="cpu")
    parser.add_argument("--batch-size", "-b", type=int, default=8)
    parser.add_argument("--learning-rate", "-l", type=float, default=5e-2)
    parser.add_argument("--seed", type=int, default=3407)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.cuda.manual_seed_all(args.seed)
    os.makedirs(args.work_dir, exist_ok=True)

    letters = (torch.arange(64 * 6) * 5 % 11).view(64, 6)
    train_dataset, test_dataset = Words(letters[:48]), Words(letters[48:])
    model = Bigram(11)
    model.to(args.device)
    print(f"model #params: {sum(p.numel() for p in model.parameters())}")
    if "--sample" in sys.argv:
        print_samples()
        sys.exit()

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.99), eps=1e-8)
    batch_loader = InfiniteDataLoader(train_dataset, batch_size=args.batch_size, pin_memory=False, num_workers=0)

    best_loss = None
    step = 0
    while True:
        t0 = time.time()
        batch = batch_loader.next()
        batch = [t.to(args.device) for t in batch]
        X, Y = batch
        logits, loss = model(X, Y)
        model.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        t1 = time.time()
        if step % 4 == 0:
            print(f"step {step} | loss {loss.item():.6f}")
        if step > 0 and step % 6 == 0:
            train_loss = evaluate(model, train_dataset, batch_size=10, max_batches=3)
            test_loss = evaluate(model, test_dataset, batch_size=10, max_batches=3)
            print(f"step {step} train loss: {train_loss:.6f} test loss: {test_loss:.6f}")
            if best_loss is None or test_loss < best_loss:
                out_path = os.path.join(args.work_dir, "model.pt")
                print(f"test loss {test_loss:.6f} is the best so far, saving model to {out_path}")
                torch.save(model.state_dict(), out_path)
                best_loss = test_loss
        step += 1
        if args.max_steps >= 0 and step >= args.max_steps:
            break
    print_samples()
    torch.save(model.state_dict(), "weights.pt")
