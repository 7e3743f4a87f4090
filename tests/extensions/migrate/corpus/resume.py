import argparse
import logging
import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    SummaryWriter = None

logger = logging.getLogger(__name__)


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    p.add_argument('--epochs', type=int, default=3)
    p.add_argument('--resume', default=None)
    p.add_argument('--output_dir', default='ckpt')
    return p.parse_args()


def build_loaders():
    g = torch.Generator().manual_seed(2)
    x = torch.randn(60, 5, generator=g)
    y = (x.sum(-1, keepdim=True) > 0).float()
    return (DataLoader(TensorDataset(x[:48], y[:48]), batch_size=12, shuffle=True),
            DataLoader(TensorDataset(x[48:], y[48:]), batch_size=12))


def save_checkpoint(path, model, optimizer, epoch, best):
    torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'epoch': epoch, 'best': best}, path)


def train_epoch(model, loader, optimizer, criterion, device, epoch, writer=None):
    model.train()
    meter = 0.
    for step, batch in enumerate(loader):
        inputs, targets = (t.to(device) for t in batch)
        logits = model(inputs)
        loss = criterion(logits, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        meter += loss.item()
        if writer:
            writer.add_scalar('loss', loss.item(), epoch * len(loader) + step)
    return meter / len(loader)


@torch.no_grad()
def validate(model, loader, criterion, device):
    model.eval()
    preds, labels = [], []
    for batch in loader:
        inputs, targets = (t.to(device) for t in batch)
        logits = model(inputs)
        preds.append(logits.sigmoid().cpu())
        labels.append(targets.cpu())
    preds, labels = torch.cat(preds), torch.cat(labels)
    return ((preds > 0.5) == labels).float().mean().item()


def main():
    args = parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)
    device = torch.device(args.device)
    os.makedirs(args.output_dir, exist_ok=True)
    train_loader, val_loader = build_loaders()
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.BCEWithLogitsLoss()
    start_epoch, best = 0, 0.0
    if args.resume is not None:
        ckpt = torch.load(args.resume, map_location=device)
        model.load_state_dict(ckpt['model'])
        optimizer.load_state_dict(ckpt['optimizer'])
        start_epoch = ckpt['epoch'] + 1
        best = ckpt['best']
    writer = None
    for epoch in range(start_epoch, args.epochs):
        loss = train_epoch(model, train_loader, optimizer, criterion, device, epoch, writer)
        acc = validate(model, val_loader, criterion, device)
        logger.info('epoch %d loss %.4f acc %.4f', epoch, loss, acc)
        print(f'{epoch} {loss:.6f} {acc:.6f}')
        if acc > best:
            best = acc
            save_checkpoint(os.path.join(args.output_dir, 'best.pt'), model, optimizer, epoch, best)
        save_checkpoint(os.path.join(args.output_dir, 'last.pt'), model, optimizer, epoch, best)


if __name__ == '__main__':
    main()
