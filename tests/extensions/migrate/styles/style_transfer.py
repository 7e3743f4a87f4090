import argparse
import os
import time
from collections import namedtuple

import numpy as np
import torch
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

Features = namedtuple("Features", ["low", "high"])


class Frozen(nn.Module):
    def __init__(self, requires_grad=False):
        super().__init__()
        self.slice1 = nn.Conv2d(3, 4, 3)
        self.slice2 = nn.Conv2d(4, 4, 3)
        if not requires_grad:
            for param in self.parameters():
                param.requires_grad = False

    def forward(self, x):
        low = torch.relu(self.slice1(x))
        return Features(low, torch.relu(self.slice2(low)))


class TransformerNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm = nn.InstanceNorm2d(3, affine=True)

    def forward(self, x):
        return self.norm(self.conv(x))


def gram_matrix(y):
    (b, ch, h, w) = y.size()
    features = y.view(b, ch, w * h)
    return features.bmm(features.transpose(1, 2)) / (ch * h * w)


def normalize_batch(batch):
    mean = batch.new_tensor([0.485, 0.456, 0.406]).view(-1, 1, 1)
    return (batch - mean) / 0.2


def train(args):
    device = torch.device("cuda" if args.accel and torch.cuda.is_available() else "cpu")
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    train_dataset = TensorDataset(torch.rand(32, 3, 8, 8), torch.zeros(32))
    train_loader = DataLoader(train_dataset, batch_size=args.batch_size)
    transformer = TransformerNet().to(device)
    optimizer = Adam(transformer.parameters(), args.lr)
    mse_loss = torch.nn.MSELoss()
    vgg = Frozen(requires_grad=False).to(device)
    style = torch.rand(1, 3, 8, 8).repeat(args.batch_size, 1, 1, 1).to(device)
    features_style = vgg(normalize_batch(style))
    gram_style = [gram_matrix(y) for y in features_style]
    for e in range(args.epochs):
        transformer.train()
        agg_content_loss = 0.0
        agg_style_loss = 0.0
        count = 0
        for batch_id, (x, _) in enumerate(train_loader):
            n_batch = len(x)
            count += n_batch
            optimizer.zero_grad()
            x = x.to(device)
            y = transformer(x)
            y = normalize_batch(y)
            x = normalize_batch(x)
            features_y = vgg(y)
            features_x = vgg(x)
            content_loss = 10.0 * mse_loss(features_y.high, features_x.high)
            style_loss = 0.0
            for ft_y, gm_s in zip(features_y, gram_style):
                gm_y = gram_matrix(ft_y)
                style_loss += mse_loss(gm_y, gm_s[:n_batch, :, :])
            style_loss *= 100.0
            total_loss = content_loss + style_loss
            total_loss.backward()
            optimizer.step()
            agg_content_loss += content_loss.item()
            agg_style_loss += style_loss.item()
            if (batch_id + 1) % args.log_interval == 0:
                mesg = "{}\tEpoch {}:\t[{}/{}]\tcontent: {:.6f}\tstyle: {:.6f}\ttotal: {:.6f}".format(
                    "now", e + 1, count, len(train_dataset), agg_content_loss / (batch_id + 1),
                    agg_style_loss / (batch_id + 1), (agg_content_loss + agg_style_loss) / (batch_id + 1),
                )
                print(mesg)
            if args.checkpoint_model_dir is not None and (batch_id + 1) % args.checkpoint_interval == 0:
                transformer.eval().cpu()
                ckpt_model_path = os.path.join(args.checkpoint_model_dir, "ckpt_" + str(batch_id + 1) + ".pth")
                torch.save(transformer.state_dict(), ckpt_model_path)
                transformer.to(device).train()
    transformer.eval().cpu()
    save_model_path = os.path.join(args.save_model_dir, "weights.pt")
    torch.save(transformer.state_dict(), save_model_path)
    print("\nDone, trained model saved at", save_model_path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--save-model-dir", type=str, default=".")
    parser.add_argument("--checkpoint-model-dir", type=str, default=".")
    parser.add_argument("--accel", action="store_true")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--log-interval", type=int, default=4)
    parser.add_argument("--checkpoint-interval", type=int, default=4)
    args = parser.parse_args()
    if not os.path.exists(args.save_model_dir):
        os.makedirs(args.save_model_dir)
    train(args)


if __name__ == "__main__":
    main()
