import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def gather_all(values):
    parts = [torch.zeros_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return torch.cat(parts)


def evaluate(model, loader):
    model.eval()
    outputs, targets = [], []
    with torch.no_grad():
        for x, y in loader:
            outputs.append(model(x).argmax(1))
            targets.append(y)
    outputs, targets = gather_all(torch.cat(outputs)), gather_all(torch.cat(targets))
    model.train()
    return (outputs == targets).float().mean().item()


def main():
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    x = torch.randn(64, 5)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
    test_loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, shuffle=False))
    model = DDP(nn.Linear(5, 2), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            first, second = x.chunk(2), y.chunk(2)
            with model.no_sync():
                (nn.functional.cross_entropy(model(first[0]), second[0]) / 2).backward()
            loss = nn.functional.cross_entropy(model(first[1]), second[1]) / 2
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        accuracy = evaluate(model, test_loader)
        if rank == 0:
            print(f"epoch {epoch} accuracy {accuracy:.4f}")
    dist.barrier(device_ids=None)
    if rank == 0:
        torch.save(model.module.state_dict(), "weights.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
