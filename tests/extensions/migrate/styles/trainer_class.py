import time
from collections import defaultdict

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torch.utils.data.dataloader import DataLoader


class Sorting(Dataset):
    def __init__(self, length=6, digits=3):
        self.length, self.digits = length, digits

    def __len__(self):
        return 64

    def get_block_size(self):
        return self.length * 2 - 1

    def __getitem__(self, idx):
        g = torch.Generator().manual_seed(idx)
        inp = torch.randint(self.digits, (self.length,), generator=g)
        cat = torch.cat((inp, torch.sort(inp)[0]))
        x, y = cat[:-1].clone(), cat[1:].clone()
        y[: self.length - 1] = -1
        return x, y


class Model(nn.Module):
    def __init__(self, vocab, block):
        super().__init__()
        self.emb = nn.Embedding(vocab, 16)
        self.pos = nn.Parameter(torch.zeros(1, block, 16))
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, vocab)

    def configure_optimizers(self, train_config):
        decay = [p for p in self.parameters() if p.dim() > 1]
        no_decay = [p for p in self.parameters() if p.dim() <= 1]
        groups = [
            {"params": decay, "weight_decay": train_config.weight_decay},
            {"params": no_decay, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=train_config.learning_rate)

    def forward(self, idx, targets=None):
        logits = self.head(self.rnn(self.emb(idx) + self.pos)[0])
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


class Config:
    device = "auto"
    num_workers = 0
    max_iters = 12
    batch_size = 8
    learning_rate = 5e-3
    weight_decay = 0.1
    grad_norm_clip = 1.0


class Trainer:
    def __init__(self, config, model, train_dataset):
        self.config = config
        self.model = model
        self.optimizer = None
        self.train_dataset = train_dataset
        self.callbacks = defaultdict(list)
        if config.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        else:
            self.device = config.device
        self.model = self.model.to(self.device)
        print("running on device", self.device)
        self.iter_num = 0
        self.iter_time = 0.0
        self.iter_dt = 0.0

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks.get(onevent, []):
            callback(self)

    def run(self):
        model, config = self.model, self.config
        self.optimizer = model.configure_optimizers(config)
        train_loader = DataLoader(
            self.train_dataset,
            sampler=torch.utils.data.RandomSampler(self.train_dataset, replacement=True, num_samples=int(1e4)),
            shuffle=False,
            batch_size=config.batch_size,
            num_workers=config.num_workers,
        )
        model.train()
        self.iter_num = 0
        self.iter_time = time.time()
        data_iter = iter(train_loader)
        while True:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(train_loader)
                batch = next(data_iter)
            batch = [t.to(self.device) for t in batch]
            x, y = batch
            logits, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_norm_clip)
            self.optimizer.step()
            self.trigger_callbacks("on_batch_end")
            self.iter_num += 1
            tnow = time.time()
            self.iter_dt = tnow - self.iter_time
            self.iter_time = tnow
            if config.max_iters is not None and self.iter_num >= config.max_iters:
                break


def batch_end_callback(trainer):
    if trainer.iter_num % 4 == 0:
        print(f"iter {trainer.iter_num}: train loss {trainer.loss.item():.6f}")


if __name__ == "__main__":
    torch.manual_seed(3407)
    dataset = Sorting()
    model = Model(3, dataset.get_block_size())
    trainer = Trainer(Config(), model, dataset)
    trainer.add_callback("on_batch_end", batch_end_callback)
    trainer.run()
    torch.save(model.state_dict(), "weights.pt")
