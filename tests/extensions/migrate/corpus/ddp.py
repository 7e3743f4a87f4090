import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def evaluate(model, loader, device):
    model.eval()
    correct = 0
    total = 0
    with torch.no_grad():
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            predicted = model(inputs).argmax(dim=1)
            correct += (predicted == targets).sum().item()
            total += targets.numel()
    return correct / total


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    world_size = dist.get_world_size()
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    x = torch.randn(97, 8)
    y = (x.sum(dim=1) > 0).long()
    train_set, test_set = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, shuffle=False)
    loader = DataLoader(train_set, batch_size=16 // world_size, sampler=sampler, num_workers=0)
    test_loader = DataLoader(test_set, batch_size=8)
    model = nn.Linear(8, 2).to(device)
    model = DDP(model, device_ids=[local_rank] if torch.cuda.is_available() else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        accuracy = evaluate(model, test_loader, device)
        if rank == 0:
            print("epoch", epoch, "accuracy", accuracy, "weight", model.module.weight.sum().item())
    if rank == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
