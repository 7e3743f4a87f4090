import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sentences(Dataset):
    def __init__(self, count):
        self.tokens = torch.randint(0, 20, (count, 6), generator=torch.Generator().manual_seed(count))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": tokens.sum() % 2}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids):
        return self.head(self.embedding(input_ids).mean(dim=1))


def main():
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader = DataLoader(Sentences(64), batch_size=16, shuffle=True)
    eval_loader = DataLoader(Sentences(22), batch_size=8)
    model = Classifier()
    model.to(device)
    no_decay = ["bias"]
    groups = [
        {"params": [p for n, p in model.named_parameters() if not any(d in n for d in no_decay)]},
        {"params": [p for n, p in model.named_parameters() if any(d in n for d in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    total_steps = 2 * len(train_loader)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=total_steps)
    for epoch in range(2):
        model.train()
        for batch in train_loader:
            batch = {k: v.to(device) for k, v in batch.items()}
            loss = nn.functional.cross_entropy(model(batch["input_ids"]), batch["labels"])
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        predictions, references = [], []
        for batch in eval_loader:
            batch = {k: v.to(device) for k, v in batch.items()}
            with torch.no_grad():
                logits = model(batch["input_ids"])
            predictions.extend(logits.argmax(dim=-1).tolist())
            references.extend(batch["labels"].tolist())
        print(epoch, loss.item(), predictions, references)


if __name__ == "__main__":
    main()
