"""Trials of Optuna as jobs, told as they come; the study stays in this process. With `gpus=1` each has a GPU."""

import concurrent.futures

import optuna

import spool


def train(x):
    """Return the loss."""
    return (x - 2) ** 2


optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(direction="minimize", sampler=optuna.samplers.RandomSampler(seed=1))
with spool.Executor(cpus=1, time_limit="10m", name="trial") as executor:
    running, left = {}, 6
    while running or left:
        while left and len(running) < 4:
            trial = study.ask()
            running[executor.submit(train, trial.suggest_float("x", -10, 10))] = trial
            left -= 1
        done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in done:
            trial = running.pop(future)
            if future.exception() is None:
                study.tell(trial, future.result())
            else:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
print("trials", len(study.trials))  # trials 6
