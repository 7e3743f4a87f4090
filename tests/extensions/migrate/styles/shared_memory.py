import argparse

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


def train_epoch(epoch, args, model, data_loader, optimizer):
    model.train()
    for batch_idx, (data, target) in enumerate(data_loader):
        optimizer.zero_grad()
        loss = F.mse_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % 4 == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}] Loss: {loss.item():.6f}")


def train(rank, args, model, dataset):
    torch.manual_seed(args.seed + rank)
    train_loader = DataLoader(dataset, batch_size=8)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        train_epoch(epoch, args, model, train_loader, optimizer)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    x = torch.randn(64, 4)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    model = nn.Linear(4, 1)
    model.share_memory()
    processes = []
    for rank in range(args.num_processes):
        p = mp.Process(target=train, args=(rank, args, model, dataset))
        p.start()
        processes.append(p)
    for p in processes:
        p.join()
    torch.save(model.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
