import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Characters(nn.Module):
    def __init__(self, size, block_size):
        super().__init__()
        self.block_size = block_size
        self.embedding = nn.Embedding(size, 8)
        self.output = nn.Linear(8 * block_size, size)

    def get_block_size(self):
        return self.block_size

    @torch.no_grad()
    def generate(self, start, count):
        found = start
        for _ in range(count):
            logits = self(found[:, -self.block_size :])
            found = torch.cat([found, logits.argmax(1, keepdim=True)], 1)
        return found

    def forward(self, x):
        return self.output(self.embedding(x).flatten(1))


def make_samples(count):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 10, (count, 5), generator=generator)


def train(args):
    device = "cuda" if args.cuda and torch.cuda.is_available() else "cpu"
    print(f"training on {device}")
    torch.manual_seed(args.seed)
    samples = make_samples(64)
    loader = DataLoader(TensorDataset(samples[:, :4], samples[:, 4]), batch_size=args.batch_size)
    model = Characters(10, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(args.epochs):
        total = 0.0
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[:, -model.get_block_size() :]), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch} loss {total / len(loader):.4f}")
    model.eval()
    start = torch.zeros(1, model.block_size, dtype=torch.long, device=device)
    print(model.generate(start, 6).shape)
    torch.save(model.state_dict(), "weights.pt")


def sample(args):
    device = "cuda" if args.cuda and torch.cuda.is_available() else "cpu"
    print(f"sampling on {device}")
    model = Characters(10, 4).to(device)
    model.load_state_dict(torch.load("weights.pt", map_location=device, weights_only=True))
    print(model.generate(torch.zeros(1, 4, dtype=torch.long).to(device), 6).tolist())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("command", nargs="?", default="train")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cuda", action="store_true")
    args = parser.parse_args()
    if args.command == "train":
        train(args)
    else:
        sample(args)


if __name__ == "__main__":
    main()
