"""CycleGAN-like: two networks, optimizers in a dict/list of groups, a LambdaLR each epoch."""
import itertools
import os
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

cuda = torch.cuda.is_available()
torch.manual_seed(0)
Tensor = torch.cuda.FloatTensor if cuda else torch.Tensor
criterion_GAN = torch.nn.MSELoss()
criterion_cycle = torch.nn.L1Loss()
G_AB = nn.Linear(4, 4)
G_BA = nn.Linear(4, 4)
D_A = nn.Linear(4, 1)
D_B = nn.Linear(4, 1)

if cuda:
    G_AB = G_AB.cuda()
    G_BA = G_BA.cuda()
    D_A = D_A.cuda()
    D_B = D_B.cuda()
    criterion_GAN.cuda()
    criterion_cycle.cuda()

optimizer_G = torch.optim.Adam(itertools.chain(G_AB.parameters(), G_BA.parameters()), lr=0.01, betas=(0.5, 0.999))
optimizer_D_A = torch.optim.Adam(D_A.parameters(), lr=0.01)
optimizer_D_B = torch.optim.Adam(D_B.parameters(), lr=0.01)
lr_scheduler_G = torch.optim.lr_scheduler.LambdaLR(optimizer_G, lr_lambda=lambda e: 1.0 - max(0, e - 1) / 3)

data = torch.randn(32, 2, 4)
dataloader = DataLoader(TensorDataset(data[:, 0], data[:, 1]), batch_size=8, shuffle=True)

for epoch in range(2):
    for i, batch in enumerate(dataloader):
        real_A = batch[0].type(Tensor)
        real_B = batch[1].type(Tensor)
        valid = torch.ones(real_A.size(0), 1, device=real_A.device)
        fake = torch.zeros(real_A.size(0), 1, device=real_A.device)

        optimizer_G.zero_grad()
        fake_B = G_AB(real_A)
        fake_A = G_BA(real_B)
        loss_GAN = (criterion_GAN(D_B(fake_B), valid) + criterion_GAN(D_A(fake_A), valid)) / 2
        loss_cycle = criterion_cycle(G_BA(fake_B), real_A) + criterion_cycle(G_AB(fake_A), real_B)
        loss_G = loss_GAN + 10.0 * loss_cycle
        loss_G.backward()
        optimizer_G.step()

        optimizer_D_A.zero_grad()
        loss_D_A = (criterion_GAN(D_A(real_A), valid) + criterion_GAN(D_A(fake_A.detach()), fake)) / 2
        loss_D_A.backward()
        optimizer_D_A.step()

        optimizer_D_B.zero_grad()
        loss_D_B = (criterion_GAN(D_B(real_B), valid) + criterion_GAN(D_B(fake_B.detach()), fake)) / 2
        loss_D_B.backward()
        optimizer_D_B.step()
        loss_D = (loss_D_A + loss_D_B) / 2
        print("[Epoch %d] [Batch %d/%d] [D loss: %.6f] [G loss: %.6f]" % (epoch, i, len(dataloader), loss_D.item(), loss_G.item()))
    lr_scheduler_G.step()
torch.save(G_AB.state_dict(), 'g_ab.pth')
