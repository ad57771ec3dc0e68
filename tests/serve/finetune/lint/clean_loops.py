# ruff: noqa: E501 (scripts as they are)
"""Correct loops in the manner of public repositories. None of them is to be named."""

CLEAN: dict[str, str] = {}

CLEAN["image classification, mixed precision by an option"] = """\
import argparse
import contextlib
import torch
import torch.nn as nn
import torch.backends.cudnn as cudnn
from torch.cuda import is_available

def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, model_ema=None, scaler=None):
    model.train()
    for i, (image, target) in enumerate(data_loader):
        image, target = image.to(device), target.to(device)
        with torch.amp.autocast("cuda", enabled=scaler is not None):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            if args.clip_grad_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            if args.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            optimizer.step()

def main(args):
    model = nn.Linear(8, 4)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda") if args.amp else None
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90)
    for epoch in range(args.epochs):
        train_one_epoch(model, criterion, optimizer, args.loader, "cuda", epoch, args, None, scaler)
        lr_scheduler.step()
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if scaler:
            checkpoint["scaler"] = scaler.state_dict()
        torch.save(checkpoint, "checkpoint.pth")
"""
CLEAN["language model, accumulation, distributed"] = """\
import os
from contextlib import nullcontext
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

dtype = "float16"
device_type = "cuda"
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type=device_type, dtype=ptdtype)
model = build_model().to(device_type)
scaler = torch.amp.GradScaler("cuda", enabled=(dtype == "float16"))
optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device_type)
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    model = DDP(model, device_ids=[0])
gradient_accumulation_steps, grad_clip = 8, 1.0
X, Y = get_batch("train")
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % 100 == 0:
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        torch.save(checkpoint, "ckpt.pt")
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num > max_iters:
        break
"""
CLEAN["accumulation by a counter"] = """\
import torch
from torch import nn
from torch.amp import GradScaler, autocast

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
optimizer = torch.optim.Adam(model.parameters())
scaler = GradScaler("cuda")
pending = 0
for x, y in loader:
    with autocast("cuda", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y) / 4
    scaler.scale(loss).backward()
    pending += 1
    if pending == 4:
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        print(norm.item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        pending = 0
"""
CLEAN["a trainer in methods"] = """\
import torch
from torch import nn
from torch.cuda.amp import grad_scaler
from torch.amp import GradScaler, autocast

class Trainer:
    def __init__(self, model, optimizer, scheduler, device="cuda", clip=1.0):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.scaler = GradScaler(device)
        self.clip = clip

    def compute_loss(self, batch):
        with autocast("cuda", dtype=torch.float16):
            return self.model(batch["x"], batch["y"])

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def clip_gradients(self):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)

    def optimizer_step(self):
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.get_scale() >= before:
            self.scheduler.step()
        self.optimizer.zero_grad()

    def fit(self, loader, epochs):
        for _ in range(epochs):
            for batch in loader:
                self.backward(self.compute_loss(batch))
                self.clip_gradients()
                self.optimizer_step()

    def save(self, path):
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                    "scaler": self.scaler.state_dict(), "scheduler": self.scheduler.state_dict()}, path)

    def load(self, path):
        state = torch.load(path)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
"""
CLEAN["bfloat16 without a scaler"] = """\
import torch
from torch import nn

model = nn.TransformerEncoderLayer(16, 2).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-8)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=100)
ema = torch.optim.swa_utils.AveragedModel(model)
for x, mask in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(x)
        scores = out.masked_fill(mask, -1e9)
        loss = (scores / (scores.norm() + 1e-8)).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    ema.update_parameters(model)
    optimizer.zero_grad()
torch.save({"optimizer": optimizer.state_dict()}, "last.pt")
"""
CLEAN["two optimizers"] = """\
import torch
scaler = torch.amp.GradScaler("cuda")
encoder, decoder = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
optimizer_e = torch.optim.Adam(encoder.parameters())
optimizer_d = torch.optim.Adam(decoder.parameters())
for x, y in loader:
    optimizer_e.zero_grad(); optimizer_d.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = torch.nn.functional.cross_entropy(decoder(encoder(x)), y)
    scaler.scale(loss).backward()
    for optimizer, net in ((optimizer_e, encoder), (optimizer_d, decoder)):
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer_e)
    scaler.step(optimizer_d)
    scaler.update()
"""
CLEAN["a GAN with two scalers"] = """\
import torch
from torch import nn

class GAN:
    def __init__(self, args):
        self.netG, self.netD = nn.Linear(4, 8).cuda(), nn.Linear(8, 1).cuda()
        self.optG = torch.optim.Adam(self.netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
        self.optD = torch.optim.Adam(self.netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
        self.scalerG, self.scalerD = torch.amp.GradScaler("cuda"), torch.amp.GradScaler("cuda")
        self.criterion = nn.BCEWithLogitsLoss()

    def step(self, real):
        noise = torch.randn(len(real), 4, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            fake = self.netG(noise)
            on_real, on_fake = self.netD(real), self.netD(fake.detach())
            loss_d = self.criterion(on_real, torch.ones_like(on_real))
            loss_d = loss_d + self.criterion(on_fake, torch.zeros_like(on_fake))
        self.optD.zero_grad()
        self.scalerD.scale(loss_d).backward()
        self.scalerD.step(self.optD)
        self.scalerD.update()
        with torch.autocast("cuda", dtype=torch.float16):
            pred = self.netD(fake)
            loss_g = self.criterion(pred, torch.ones_like(pred))
        self.optG.zero_grad()
        self.scalerG.scale(loss_g).backward()
        self.scalerG.step(self.optG)
        self.scalerG.update()
        return {"d": loss_d.item(), "g": loss_g.item()}
"""
CLEAN["pix2pix"] = """\
import torch
from torch import nn
from torch.amp import autocast, GradScaler

gen, disc = nn.Conv2d(3, 3, 3, padding=1).cuda(), nn.Conv2d(6, 1, 3).cuda()
opt_gen = torch.optim.Adam(gen.parameters(), lr=2e-4)
opt_disc = torch.optim.Adam(disc.parameters(), lr=2e-4)
BCE, L1 = nn.BCEWithLogitsLoss(), nn.L1Loss()
g_scaler, d_scaler = GradScaler("cuda"), GradScaler("cuda")

def train_fn(loader):
    for x, y in loader:
        with autocast("cuda"):
            y_fake = gen(x)
            d_real = disc(torch.cat([x, y], 1))
            d_fake = disc(torch.cat([x, y_fake.detach()], 1))
            d_loss = (BCE(d_real, torch.ones_like(d_real)) + BCE(d_fake, torch.zeros_like(d_fake))) / 2
        opt_disc.zero_grad()
        d_scaler.scale(d_loss).backward()
        d_scaler.step(opt_disc)
        d_scaler.update()
        with autocast("cuda"):
            d_fake = disc(torch.cat([x, y_fake], 1))
            g_loss = BCE(d_fake, torch.ones_like(d_fake)) + 100 * L1(y_fake, y)
        opt_gen.zero_grad()
        g_scaler.scale(g_loss).backward()
        g_scaler.step(opt_gen)
        g_scaler.update()
train_fn(loader)
"""
CLEAN["gradient penalty"] = """\
import torch
from torch import nn

net = nn.Linear(8, 1).cuda()
optimizer = torch.optim.Adam(net.parameters())
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x), y)
    scaled = torch.autograd.grad(outputs=scaler.scale(loss), inputs=net.parameters(), create_graph=True)
    inverse = 1.0 / scaler.get_scale()
    grads = [p * inverse for p in scaled]
    with torch.autocast("cuda", dtype=torch.float16):
        norm = sum(g.pow(2).sum() for g in grads).sqrt()
        loss = loss + norm
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
CLEAN["Accelerate"] = """\
import torch
from accelerate import Accelerator
from transformers import get_scheduler

def main(args):
    accelerator = Accelerator(gradient_accumulation_steps=args.steps, mixed_precision="fp16")
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-8)
    lr_scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=10, num_training_steps=100)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, args.loader, lr_scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
"""
CLEAN["Lightning, optimized by hand"] = """\
import torch
import lightning as L
from torch import nn

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Linear(8, 4)
        self.loss = nn.CrossEntropyLoss()

    def training_step(self, batch, number):
        x, y = batch
        opt = self.optimizers()
        opt.zero_grad()
        loss = self.loss(self.net(x), y)
        self.manual_backward(loss)
        self.clip_gradients(opt, gradient_clip_val=1.0)
        opt.step()
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.net.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 10)]

trainer = L.Trainer(precision="16-mixed", max_epochs=2)
trainer.fit(Module(), loader)
"""
CLEAN["HF Trainer"] = """\
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.float32)
model = get_peft_model(model, LoraConfig(r=8, target_modules=["c_attn"]))
args = TrainingArguments("out", fp16=True, gradient_accumulation_steps=4, max_grad_norm=1.0)
trainer = Trainer(model=model, args=args, train_dataset=dataset)
trainer.train()
"""
CLEAN["half weights with adapters in FP32"] = """\
import torch
from diffusers import UNet2DConditionModel
from diffusers.training_utils import cast_training_params
from peft import LoraConfig

unet = UNet2DConditionModel.from_pretrained("x", torch_dtype=torch.float16)
unet.requires_grad_(False)
unet.add_adapter(LoraConfig(r=4))
for param in unet.parameters():
    if param.requires_grad:
        param.data = param.to(torch.float32)
lora = [p for p in unet.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(lora, lr=1e-4)
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = unet(x).sub(y).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
CLEAN["attention, guards and masks in FP32"] = """\
import math
import torch
from torch import nn
import torch.nn.functional as F

class Attention(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def rms(self, x):
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight

    def forward(self, x, mask=None):
        q, k, v = self.qkv(self.rms(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
            scores = scores + (1.0 - mask) * -1e4
            scores[mask == 0] = float("-inf")
        weights = F.softmax(scores, dim=-1, dtype=torch.float32)
        entropy = -(weights * (weights + 1e-12).log()).sum(-1).mean()
        return self.out(weights.to(v.dtype) @ v), entropy / (mask.float().sum() + 1e-8)

model = Attention(8).cuda()
optimizer = torch.optim.Adam(model.parameters(), eps=1e-8)
scaler = torch.amp.GradScaler("cuda")
for x, mask in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out, entropy = model(x, mask)
        loss = out.float().pow(2).mean() / (out.float().std() + 1e-8) + entropy
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
CLEAN["own autograd functions"] = """\
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd

class Product(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x

class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g.neg() * ctx.alpha, None

class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g

net = nn.Linear(8, 4).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = Round.apply(Reverse.apply(Product.apply(x, net.weight), 0.5)).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
CLEAN["average and schedule by taken steps"] = """\
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

model = nn.Linear(8, 4).cuda()
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=50)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14, growth_interval=500)
for epoch in range(2):
    for x, y in loader:
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        skipped = scaler.get_scale() < scale
        if not skipped:
            schedule.step()
            ema.update_parameters(model)
"""
CLEAN["an average each epoch"] = """\
import torch
from torch import nn

model = nn.Linear(8, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
swa_model = torch.optim.swa_utils.AveragedModel(model)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
scaler = torch.amp.GradScaler()
for epoch in range(5):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        total += loss.item()
    swa_model.update_parameters(model)
    plateau.step(total)
"""
CLEAN["bad losses are passed over"] = """\
import math
import sys
import torch
from torch import nn
import torch.distributed as dist

class NativeScaler:
    state_dict_key = "amp_scaler"

    def __init__(self):
        self._scaler = torch.amp.GradScaler("cuda")

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, create_graph=False, update_grad=True):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if update_grad:
            if clip_grad is not None:
                self._scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
            else:
                self._scaler.unscale_(optimizer)
                norm = get_grad_norm_(parameters)
            self._scaler.step(optimizer)
            self._scaler.update()
        else:
            norm = None
        return norm

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict):
        self._scaler.load_state_dict(state_dict)

def train(model, criterion, loader, optimizer, loss_scaler, accum_iter):
    for step, (x, y) in enumerate(loader):
        with torch.amp.autocast("cuda"):
            loss = criterion(model(x), y)
        value = loss.item()
        if not math.isfinite(value):
            sys.exit(1)
        loss = loss / accum_iter
        loss_scaler(loss, optimizer, parameters=model.parameters(), update_grad=(step + 1) % accum_iter == 0)
        if (step + 1) % accum_iter == 0:
            optimizer.zero_grad()
"""
CLEAN["reinforcement learning"] = """\
import copy
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

def soft_update(target, source, tau):
    with torch.no_grad():
        for t, s in zip(target.parameters(), source.parameters()):
            t.copy_((1 - tau) * t + tau * s)

actor, critic = nn.Linear(4, 2).cuda(), nn.Linear(6, 1).cuda()
target = copy.deepcopy(critic)
actor_optim = torch.optim.Adam(actor.parameters(), lr=1e-4)
critic_optim = torch.optim.Adam(critic.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
for obs, action, reward in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        critic_loss = (critic(torch.cat([obs, action], 1)) - reward).square().mean()
    critic_optim.zero_grad()
    scaler.scale(critic_loss).backward()
    scaler.unscale_(critic_optim)
    clip_grad_norm_(critic.parameters(), 1.0)
    scaler.step(critic_optim)
    with torch.autocast("cuda", dtype=torch.float16):
        actor_loss = -critic(torch.cat([obs, actor(obs)], 1)).mean()
    actor_optim.zero_grad()
    scaler.scale(actor_loss).backward()
    scaler.unscale_(actor_optim)
    clip_grad_norm_(actor.parameters(), 1.0)
    scaler.step(actor_optim)
    scaler.update()
"""
CLEAN["Apex"] = """\
import torch
from apex import amp

netD, netG = torch.nn.Linear(8, 1).cuda(), torch.nn.Linear(4, 8).cuda()
optD = torch.optim.Adam(netD.parameters())
optG = torch.optim.Adam(netG.parameters())
[netD, netG], [optD, optG] = amp.initialize([netD, netG], [optD, optG], opt_level="O1", num_losses=3)
criterion = torch.nn.BCEWithLogitsLoss()
for real, noise in loader:
    optD.zero_grad()
    on_real = netD(real)
    loss_real = criterion(on_real, torch.ones_like(on_real))
    with amp.scale_loss(loss_real, optD, loss_id=0) as scaled:
        scaled.backward()
    fake = netG(noise)
    on_fake = netD(fake.detach())
    loss_fake = criterion(on_fake, torch.zeros_like(on_fake))
    with amp.scale_loss(loss_fake, optD, loss_id=1) as scaled:
        scaled.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optD), 1.0)
    optD.step()
    optG.zero_grad()
    on_fake = netD(fake)
    loss_g = criterion(on_fake, torch.ones_like(on_fake))
    with amp.scale_loss(loss_g, optG, loss_id=2) as scaled:
        scaled.backward()
    optG.step()
torch.save({"optimizer": optG.state_dict(), "amp": amp.state_dict()}, "last.pt")
"""
CLEAN["probabilities in FP32, old names for old versions"] = """\
import torch
from torch import nn
try:
    from torch.amp import GradScaler, autocast
except ImportError:
    from torch.cuda.amp import GradScaler, autocast

model, bce = nn.Linear(8, 4).cuda(), nn.BCELoss()
optimizer = torch.optim.Adam(model.parameters())
scaler = GradScaler()
for x, y in loader:
    optimizer.zero_grad()
    with autocast("cuda"):
        logits = model(x)
        with autocast("cuda", enabled=False):
            loss = bce(torch.sigmoid(logits.float()), y)
    loss = loss + bce(torch.sigmoid(logits.float()), y)
    scaler.scale(loss).backward()
    if step_is_last:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        for p in model.parameters():
            p.data.clamp_(-1, 1)
"""
CLEAN["several tasks, optimizers and schedules in lists"] = """\
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.trunk = nn.Sequential(nn.Linear(32, 64), nn.GELU()); self.cls = nn.Linear(64, 5); self.reg = nn.Linear(64, 1)
        self.log_var = nn.Parameter(torch.zeros(2))
    def forward(self, x): h = self.trunk(x); return self.cls(h), self.reg(h).squeeze(-1)
net = Net().cuda(); ce, mse = nn.CrossEntropyLoss(ignore_index=-1), nn.SmoothL1Loss()
opts = [torch.optim.AdamW(net.trunk.parameters(), 1e-4), torch.optim.AdamW([*net.cls.parameters(), *net.reg.parameters(), net.log_var], 1e-3)]
scaler = torch.amp.GradScaler("cuda")
warm = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1.0, (s + 1) / 100)) for o in opts]
for step in range(200):
    x, y, t = torch.randn(16, 32).cuda(), torch.randint(-1, 5, (16,)).cuda(), torch.randn(16).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        a, b = net(x)
        l1, l2 = ce(a, y), mse(b, t)
        loss = torch.exp(-net.log_var[0]) * l1 + torch.exp(-net.log_var[1]) * l2 + net.log_var.sum()
    for o in opts: o.zero_grad()
    scaler.scale(loss).backward()
    for o in opts:
        scaler.unscale_(o)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    for o in opts:
        scaler.step(o)
    scale = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() >= scale:
        for w in warm: w.step()
"""
CLEAN["contrastive pairs and a momentum encoder"] = """\
import torch
import torch.nn.functional as F
from torch import nn
class SimCLR(nn.Module):
    def __init__(self): super().__init__(); self.enc = nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.ReLU()); self.proj = nn.Linear(256, 64)
    def forward(self, x): return F.normalize(self.proj(self.enc(x)).float(), dim=-1, eps=1e-6)
def nt_xent(z, temperature=0.1):
    n = z.size(0) // 2
    sim = z @ z.t() / temperature
    mask = torch.eye(2 * n, dtype=torch.bool, device=z.device)
    sim = sim.float().masked_fill(mask, float("-inf"))
    labels = torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(z.device)
    return F.cross_entropy(sim, labels)
def main(device="cuda"):
    model = SimCLR().to(device)
    momentum = SimCLR().to(device); momentum.load_state_dict(model.state_dict())
    for p in momentum.parameters(): p.requires_grad_(False)
    opt = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler(device)
    for epoch in range(10):
        for _ in range(5):
            v1, v2 = torch.randn(32, 3, 32, 32, device=device), torch.randn(32, 3, 32, 32, device=device)
            with torch.autocast(device, dtype=torch.float16):
                z = model(torch.cat([v1, v2]))
                loss = nt_xent(z)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            before = scaler.get_scale()
            scaler.step(opt)
            scaler.update()
            if scaler.get_scale() >= before:
                with torch.no_grad():
                    for a, b in zip(momentum.parameters(), model.parameters()):
                        a.mul_(0.99).add_(b, alpha=0.01)
main()
"""
