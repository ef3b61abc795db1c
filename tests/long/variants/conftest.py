"""The claims of other folders again, under the executors and shells that are not the first."""
