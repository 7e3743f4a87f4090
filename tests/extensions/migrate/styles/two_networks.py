import argparse
import random

import torch
import torchvision.utils as vutils
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=16)
parser.add_argument("--nz", type=int, default=4)
parser.add_argument("--niter", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.002)
parser.add_argument("--manualSeed", type=int, default=3)
parser.add_argument("--dry-run", action="store_true")
parser.add_argument("--netG", default="", help="path to netG (to continue training)")
opt = parser.parse_args()
print(opt)

if opt.manualSeed is None:
    opt.manualSeed = random.randint(1, 10000)
random.seed(opt.manualSeed)
torch.manual_seed(opt.manualSeed)

dataset = TensorDataset(torch.randn(64, 1, 8, 8).tanh(), torch.zeros(64))
dataloader = DataLoader(dataset, batch_size=opt.batchSize, shuffle=True, num_workers=0)

if torch.accelerator.is_available():
    device = torch.accelerator.current_accelerator()
else:
    device = torch.device("cpu")
nz = int(opt.nz)


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.02)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, 8, 4), nn.BatchNorm2d(8), nn.ReLU(True), nn.ConvTranspose2d(8, 1, 5), nn.Tanh()
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Conv2d(1, 8, 5), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4), nn.Sigmoid())

    def forward(self, input):
        return self.main(input).view(-1, 1).squeeze(1)


netG = Generator().to(device)
netG.apply(weights_init)
if opt.netG != "":
    netG.load_state_dict(torch.load(opt.netG))
netD = Discriminator().to(device)
netD.apply(weights_init)

criterion = nn.BCELoss()
fixed_noise = torch.randn(opt.batchSize, nz, 1, 1, device=device)
real_label = 1
fake_label = 0
optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(0.5, 0.999))

for epoch in range(opt.niter):
    for i, data in enumerate(dataloader, 0):
        netD.zero_grad()
        real_cpu = data[0].to(device)
        batch_size = real_cpu.size(0)
        label = torch.full((batch_size,), real_label, dtype=real_cpu.dtype, device=device)
        output = netD(real_cpu)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean().item()

        noise = torch.randn(batch_size, nz, 1, 1, device=device)
        fake = netG(noise)
        label.fill_(fake_label)
        output = netD(fake.detach())
        errD_fake = criterion(output, label)
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimizerD.step()

        netG.zero_grad()
        label.fill_(real_label)
        output = netD(fake)
        errG = criterion(output, label)
        errG.backward()
        optimizerG.step()

        print("[%d/%d][%d/%d] %.6f %.6f %.6f" % (epoch, opt.niter, i, len(dataloader), errD.item(), errG.item(), D_x))
        if i % 2 == 0:
            vutils.save_image(real_cpu, "real_samples.png", normalize=True)
            fake = netG(fixed_noise)
            vutils.save_image(fake.detach(), "fake_samples_epoch_%03d.png" % epoch, normalize=True)
        if opt.dry_run:
            break
    torch.save(netG.state_dict(), "netG_epoch_%d.pth" % epoch)
torch.save(netD.state_dict(), "weights.pt")
