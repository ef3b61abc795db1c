#!/bin/sh
# Jupyter, once there is a GPU; GPUS=0 for none. It ends after an hour without work on the GPU, and goes
# on if the connection is lost: `spool log notebook` shows the address again, `spool cancel notebook` ends it.
exec spool run --name notebook --gpus "${GPUS:-1}" --cpus 2 --time-limit 8h \
    --set gpu_idle=1h --set gpu_idle_action=stop -- jupyter lab --no-browser --port "${PORT:-8899}"
