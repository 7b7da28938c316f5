"""k-fold cross-validation in PyTorch: networks trained on a swarm's rows, schedules and augmentation draws."""

from functools import partial

import jax
import numpy as np
import torch
from torch.optim import lr_scheduler

import turbanet as tn
from study.baselines import processes
from study.baselines.trainers import torch_threads
from study.measurement import timing
from turbanet.data.augment import draw

SCHEDULERS = {  # PyTorch's own, by the names of `turbanet.with_schedule`
    "constant": None,
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=10, eta_min=1e-6),
    "warm": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=10, eta_min=1e-6),
    "multistep": partial(lr_scheduler.MultiStepLR, milestones=[82, 123], gamma=0.1),
    "reduce": partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=5),
}


def train_folds(
    twins, x, y, *, order, held_out, schedules, learning_rate, epochs, augment=None, drawn=None, threads=None
):
    """Cross-validate PyTorch networks one after the other, in place: fused Adam, cross-entropy, a schedule each.

    Parameters
    ----------
    x, y : [row, height, width, channel], int [row]
    order : int [member, epoch, step, batch], the rows of each step, from `turbanet.batch_order`
    held_out : int [member, row], padded with -1; the validation rows, scored after each epoch, never augmented
    schedules : names in SCHEDULERS, one for each network
    augment, drawn : the augmentation of training images and its random draws (`draws`)
    threads : PyTorch's threads during the call; None leaves them

    Returns
    -------
    train_loss, validation_loss, accuracy : float64 [epoch, member]
    seconds : [member]
    right : [class, member], correctly classified validation rows of each class after the last epoch
    """
    x, y, order = torch.tensor(x), torch.tensor(y, dtype=torch.long), torch.tensor(order, dtype=torch.long)
    drawn = jax.tree.map(torch.tensor, drawn)
    scores = np.empty((3, epochs, len(twins)))
    seconds = np.empty(len(twins))
    right = np.empty((int(y.max()) + 1, len(twins)))
    with torch_threads(threads):
        for member, twin in enumerate(twins):
            rows = torch.as_tensor(held_out[member][held_out[member] >= 0], dtype=torch.long)
            of_member = jax.tree.map(lambda leaf, member=member: leaf[member], drawn)
            kwargs = {"learning_rate": learning_rate, "augment": augment, "drawn": of_member}
            with timing.stopwatch() as watch:
                losses, prediction = _train_fold(twin, x, y, order[member], rows, schedules[member], **kwargs)
            seconds[member] = watch.seconds
            scores[:, :, member] = losses.T
            found = y[rows][prediction == y[rows]]
            right[:, member] = torch.bincount(found, minlength=len(right))
    return *scores, seconds, right


def _train_fold(twin, x, y, order, held_out, schedule, *, learning_rate, augment, drawn):
    """Train one network: ([epoch, (training loss, validation loss, accuracy)], its last predicted classes)."""
    loss_fn = torch.nn.functional.cross_entropy
    optimizer = torch.optim.Adam(twin.parameters(), lr=learning_rate, fused=True)
    scheduler = SCHEDULERS[schedule] and SCHEDULERS[schedule](optimizer)
    scores = []
    for epoch, batches in enumerate(order):
        twin.train()
        losses = []
        for step, batch in enumerate(batches, start=epoch * len(batches)):
            images = x[batch]
            if drawn is not None:
                images = augmented(augment, jax.tree.map(lambda leaf, step=step: leaf[step], drawn), images)
            optimizer.zero_grad()
            value = loss_fn(twin(images), y[batch])
            value.backward()
            optimizer.step()
            losses.append(value.detach())
        twin.eval()
        with torch.no_grad():
            prediction = twin(x[held_out])
            validation = loss_fn(prediction, y[held_out]).item()
            chosen = prediction.argmax(-1)
            right = (chosen == y[held_out]).double().mean().item()
        scores.append((torch.stack(losses).double().mean().item(), validation, right))
        if scheduler is not None:
            scheduler.step(*[validation] * (schedule == "reduce"))
    return np.array(scores), chosen


def train_folds_in_processes(twins, x, y, *, order, held_out, schedules, drawn=None, **settings):
    """Run `train_folds` in processes of one thread each; `settings` are those of `in_processes` and `train_folds`."""
    own = {"order": order, "held_out": held_out, "schedules": np.asarray(schedules), "drawn": drawn}
    return processes.in_processes(train_folds, twins, own, x=x, y=y, **settings)


def draws(swarm, augment, *, steps, rows):
    """Draw `augment`'s random numbers for each member's next `steps` batches of `rows`: [member, step, row, ...]."""

    def of_step(state, step):
        return draw(augment, state.replace(step=state.step + step), rows)

    def of_member(state):
        return jax.vmap(of_step, (None, 0))(state, np.arange(steps))

    light = swarm.replace(params={}, opt_state={}, collections={}, schedule=None)  # only identity and step matter
    return jax.device_get(jax.jit(jax.vmap(of_member))(light))


def augmented(augment, drawn, x):
    """Apply the drawn augmentation to x [row, height, width, channel] in PyTorch, as `augment.apply` does in JAX."""
    if isinstance(augment, tn.Chain):
        for change, own in zip(augment.changes, drawn, strict=True):
            x = augmented(change, own, x)
        return x
    if isinstance(augment, tn.RandomFlip):
        return torch.where(drawn[:, None, None, None], x.flip(2), x)
    if not isinstance(augment, tn.RandomCrop):
        raise ValueError(f"There is no PyTorch form of {augment!r}; known: RandomCrop, RandomFlip, Chain.")
    padded = torch.nn.functional.pad(x, (0, 0, *(augment.padding,) * 4))
    rows = drawn[:, :1].long() + torch.arange(x.shape[1])
    columns = drawn[:, 1:].long() + torch.arange(x.shape[2])
    return padded[torch.arange(len(x))[:, None, None], rows[:, :, None], columns[:, None, :]]
