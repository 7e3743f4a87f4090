import argparse
import time

import torch
from torch import nn
from torch.optim import Adam


class GraphConv(nn.Module):
    def __init__(self, input_dim, output_dim):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(input_dim, output_dim))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, input_tensor, adj_mat):
        return torch.mm(adj_mat, torch.mm(input_tensor, self.kernel))


class GCN(nn.Module):
    def __init__(self, input_dim, hidden_dim, output_dim, dropout_p=0.1):
        super().__init__()
        self.gc1 = GraphConv(input_dim, hidden_dim)
        self.gc2 = GraphConv(hidden_dim, output_dim)
        self.dropout = nn.Dropout(dropout_p)

    def forward(self, input_tensor, adj_mat):
        x = self.dropout(torch.relu(self.gc1(input_tensor, adj_mat)))
        return torch.log_softmax(self.gc2(x, adj_mat), dim=1)


def load_graph(device="cpu"):
    features = torch.rand(30, 12)
    labels = torch.arange(30) % 3
    adj = (torch.rand(30, 30) < 0.2).float() + torch.eye(30)
    adj = adj / adj.sum(dim=1, keepdim=True)
    return features.to(device), labels.to(device), adj.to(device)


def train_iter(epoch, model, optimizer, criterion, input, target, mask_train, mask_val, print_every=5):
    start_t = time.time()
    model.train()
    optimizer.zero_grad()
    output = model(*input)
    loss = criterion(output[mask_train], target[mask_train])
    loss.backward()
    optimizer.step()
    loss_train, acc_train = test(model, criterion, input, target, mask_train)
    loss_val, acc_val = test(model, criterion, input, target, mask_val)
    if epoch % print_every == 0:
        print(f"Epoch: {epoch:04d} loss_train: {loss_train:.6f} acc: {acc_train:.4f} loss_val: {loss_val:.6f} {acc_val:.4f}")


def test(model, criterion, input, target, mask):
    model.eval()
    with torch.no_grad():
        output = model(*input)
        output, target = output[mask], target[mask]
        loss = criterion(output, target)
        acc = (output.argmax(dim=1) == target).float().sum() / len(target)
    return loss.item(), acc.item()


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description="Graph convolution")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--no-accel", action="store_true", default=False)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    use_accel = not args.no_accel and torch.accelerator.is_available()
    torch.manual_seed(args.seed)
    device = torch.accelerator.current_accelerator() if use_accel else torch.device("cpu")
    print(f"Using {device} device")
    features, labels, adj_mat = load_graph(device=device)
    idx = torch.randperm(len(labels)).to(device)
    idx_test, idx_val, idx_train = idx[:10], idx[10:15], idx[15:]
    gcn = GCN(features.shape[1], 8, 3).to(device)
    optimizer = Adam(gcn.parameters(), lr=args.lr, weight_decay=5e-4)
    criterion = nn.NLLLoss()
    for epoch in range(args.epochs):
        train_iter(epoch + 1, gcn, optimizer, criterion, (features, adj_mat), labels, idx_train, idx_val)
    loss_test, acc_test = test(gcn, criterion, (features, adj_mat), labels, idx_test)
    print(f"Test set results: loss {loss_test:.6f} accuracy {acc_test:.4f}")
    torch.save(gcn.state_dict(), "weights.pt")
