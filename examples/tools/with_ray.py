"""Ray Tune chooses the parameters; each trial waits for the job that trains. `num_cpus` trials are queued at once."""

import ray
from ray import tune

import spool


def train(x):
    """Return the loss."""
    return (x - 2) ** 2


def trial(config):
    """Train in a job of its own."""
    with spool.Executor(cpus=1, time_limit="10m", name="trial") as executor:
        return {"loss": executor.submit(train, config["x"]).result()}


ray.init(num_cpus=4, include_dashboard=False)
tuner = tune.Tuner(
    trial,
    param_space={"x": tune.uniform(-10, 10)},
    tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=6),
)
print("trials", len(tuner.fit()))  # trials 6
