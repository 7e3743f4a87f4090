"""A class that trains on processes which the script starts, one for each GPU."""
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = os.environ.get("PORT", "12355")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


def reduce_mean(value, world_size):
    total = value.clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total / world_size


class Trainer:
    def __init__(self, model, loader, optimizer, gpu_id, world_size):
        self.gpu_id = gpu_id
        self.world_size = world_size
        self.loader = loader
        self.optimizer = optimizer
        self.model = DDP(model, device_ids=[gpu_id] if torch.cuda.is_available() else None)

    def save(self, epoch):
        torch.save(self.model.module.state_dict(), "model.pt")
        print(f"saved {epoch}")

    def train(self, epochs):
        first = len(next(iter(self.loader))[0])
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            for inputs, targets in self.loader:
                loss = nn.functional.mse_loss(self.model(inputs), targets)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            mean = reduce_mean(loss.detach(), self.world_size)
            if self.gpu_id == 0:
                print(f"epoch {epoch} loss {mean.item():.6f}")
            if self.gpu_id == 0 and first:
                self.save(epoch)


def main(rank, world_size, batch_size, epochs):
    print(f"process {rank}")
    setup(rank, world_size)
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    dataset = TensorDataset(x, x.sum(dim=1, keepdim=True))
    loader = DataLoader(dataset, batch_size=batch_size, sampler=DistributedSampler(dataset, shuffle=False))
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = Trainer(model, loader, optimizer, rank, world_size)
    trainer.train(epochs)
    cleanup()


if __name__ == "__main__":
    world_size = max(torch.cuda.device_count(), 1)
    mp.spawn(main, args=(world_size, 8, 2), nprocs=world_size)
