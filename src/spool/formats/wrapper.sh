#!/bin/sh
# The wrapper of a run. It proves who it is, runs the command as its child, passes signals on, and
# writes the exit code down as the last thing. Everything here is the same for every run: run.sh reads
# it, assigns what differs, and starts it. docs/FORMAT.md has its records.
#
# It starts no process of its own unless something is amiss: each would cost as much as a small job.
# shellcheck disable=SC2317  # traps call functions, and end the script in more places than one
set -f
unset SPOOL_DIR SPOOL_JOB SPOOL_RUN SPOOL_ATTEMPT SPOOL_METADIR SPOOL_CPUS SPOOL_CPU_LIST SPOOL_MEMORY_MB
unset SPOOL_GPUS SPOOL_GPU_INDICES SPOOL_ARRAY_INDEX SPOOL_EXIT_CODE SPOOL_ENV SPOOL_SERVICE
unset SHLVL _ # which tell of who started this, and through how many shells

spool_told=${1-} # told: who this process is comes on stdin
spool_metadir='' # the directory of this run, absolute, as are all paths here
spool_boot='' spool_pid_namespace='' spool_host='' # of the dispatcher, for the jid
spool_engine='' # of a run on a cluster: its engine, and the variables that say which node this is and which id it has
spool_node_in='' spool_id_in=''
spool_masked='' # exit codes that mean more than an end to that engine, such as to start the job again
spool_watch='' # yes: that engine cannot signal this script, which reads the signals from the record `signals`
spool_workdir='/'
spool_stdin='/dev/null' # empty: as this script has it
spool_stdout=''         # appended to; empty: as this script has it
spool_stderr=''         # appended to; empty: where stdout goes
spool_shell='/bin/sh'   # runs the five texts
spool_init='' spool_prolog='' spool_prep='' spool_end='' spool_epilog=''
spool_cgroup='' # the cgroup.procs file to enter, if any
spool_env='env' # the program, and the option with which it undoes that SIGINT and SIGQUIT are ignored
spool_reset=''
spool_become='' # a program of spool's own that does this too, in a tenth of the time, if it is still there
spool_terminal='' # own: stdin is a terminal of this run's own; shared: it runs in the terminal of who submitted it
spool_umask=''    # of the command, where the records would be writable by others under it
spool_limits=''   # soft limits of the command: LETTER=NUMBER, as ulimit takes them
spool_nicer=''    # its niceness, less that of this script
spool_files=''    # how many files the job may have open, where this shell was given another number
spool_odd='' # yes: spool_environment hands variables to env that not every shell can export
spool_environment() { spool_exec "$@"; }

spool_child='' spool_ended=0 spool_code=0 spool_interrupted='' spool_pending='' spool_opened='' spool_created='' spool_announced='' spool_late=''
spool_watcher='' spool_seen=0 spool_count=0 spool_added='' spool_size=0 spool_why=''
spool_phase='' spool_before='' spool_starting='' spool_done='' spool_tries=0 spool_id='' spool_own='' spool_groups=/sys/fs/cgroup
spool_newline='
'

# spool_open_records: hold the metadir itself as 8, so that it is found wherever it is moved to. Where that cannot be, its
# path has to do. No command inherits it.
spool_open_records() {
    command exec 8< "$spool_metadir" || return
    if [ -d /proc/self/fd/8/ ] && ! spool_astray; then spool_records=/proc/self/fd/8; fi
}

# spool_record NAME LINE: write one record of the metadir.
spool_record() {
    ${spool_umask:+umask go-w}
    if spool_astray || spool_in_the_way "$1"; then return 1; fi
    printf '%s\n' "$2" > "$spool_records/$1"
}

# spool_in_the_way NAME: true if what is where a record belongs is not a file: opening a FIFO would block forever.
spool_in_the_way() {
    if [ -h "$spool_records/$1" ]; then return 0; fi
    [ -e "$spool_records/$1" ] && [ ! -f "$spool_records/$1" ]
}

# spool_astray: true if a link stands for the directory of this run, or of its job: what lies there is another's. Nothing
# stands for a directory that is held. A trap may call this, where `return` alone has the status from before the trap.
spool_astray() {
    [ "$spool_records" = "$spool_metadir" ] || return 1
    [ -h "$spool_metadir" ] || [ -h "${spool_metadir%/*}" ]
}

# spool_note RECORD: leave a note that a record is there. No event tells that, and a look at the records of all runs
# would take too long.
spool_note() {
    if [ -z "$spool_engine" ] && [ "$1" != leftovers ]; then return; fi
    spool_file=${spool_metadir%/*}
    spool_file=$spool_records/../../.notes/${spool_file##*/}.${spool_metadir##*/}.$1
    if [ ! -d "${spool_file%/*}" ] || [ -h "${spool_file%/*}" ] || [ -h "$spool_file" ] || [ -e "$spool_file" ]; then return; fi
    command : > "$spool_file" # which keeps the shell alive where that fails
}

# spool_fail CODE WHY: the run ends with CODE, and the record `error` says why; and the log, unless it was stopped.
spool_fail() {
    spool_code=$1
    if [ ! -e "$spool_records/stop" ] && [ ! -e "$spool_records/signal" ]; then
        spool_say "$2"
    fi
    spool_record error "$2"
}

# spool_signal NAME CODE: pass a signal on to the child. CODE is not 0 for those that end the run.
# The record `signal` is for a child that is so young that it still has this script's own handlers: it would
# not notice the signal, but looks for the record before it turns into the command.
# A run whose terminal was taken away is cut off: it ends without an exit code, which means lost. What the
# terminal's keys raise, it has sent to the child already, and a second one would break off what that cleans up.
# Nothing here goes by the status of a command: where another signal comes at this moment, dash runs its trap in between,
# and gives what was asked last the status from before the first trap.
spool_signal() {
    spool_interrupted=yes
    case $1$spool_terminal in
    HUPown)
        if [ ! -t 0 ]; then
            trap - EXIT
            exit "$2"
        fi
        ;;
    esac
    # A child is there before spool_run can note its number, and may wait for a signal by then.
    case $spool_starting:$! in
    :* | "yes:$spool_before") ;;
    *) spool_child=$! ;;
    esac
    case $2 in
    0) ;;
    *)
        spool_ended=$2 spool_pending=$1
        spool_record signal "$1"
        ;;
    esac
    case $spool_child:$spool_terminal$1 in
    :*) ;;
    *:?*INT | *:?*QUIT) spool_pending='' ;;
    *)
        spool_pending=''
        kill -s "$1" "$spool_child"
        ;;
    esac
}

# spool_identify: set spool_identity to "PID START_TICKS BOOT_ID PID_NAMESPACE HOST [ENGINE:ID]". A shell reads
# /proc byte by byte, which takes longer than its own start; so the process that started this one may have sent
# "PID START_TICKS".
spool_identify() {
    spool_pid='' spool_ticks=''
    # What is cut off before the end of its line may be the beginning of another number.
    if [ "$spool_told" = told ]; then
        read -r spool_pid spool_ticks || spool_ticks=''
    fi
    case $spool_ticks in
    '' | *[!0-9]*) spool_pid='' ;;
    esac
    if [ "$spool_pid" != "$$" ]; then
        IFS= read -r spool_line < /proc/sys/kernel/random/boot_id || return 1
        # On another machine that program may be one for another processor.
        if [ "$spool_line" != "$spool_boot" ]; then spool_become=''; fi
        spool_boot=$spool_line
        IFS= read -r spool_line < "/proc/$$/stat" || return 1
        # The second field is the program's name in parentheses and may hold anything, so count from its end.
        # shellcheck disable=SC2086  # to be split; `set -f` is in force
        set -- ${spool_line##*) }
        [ "$#" -ge 20 ] || return 1
        spool_ticks=${20}
    fi
    spool_identity="$$ $spool_ticks $spool_boot $spool_pid_namespace $spool_host"
    if [ -n "$spool_engine" ]; then
        eval "spool_host=\${$spool_node_in:-unknown} spool_id=\${$spool_id_in:-unknown}"
        # An element of an array has an id of its own, by which the engine lists it.
        # shellcheck disable=SC2154  # eval sets it
        spool_identity="$$ $spool_ticks $spool_boot $spool_pid_namespace $spool_host $spool_engine:${SPOOL_ENGINE_ID:-$spool_id}"
        unset SPOOL_ENGINE_ID
    fi
}

# spool_watch_signals: pass each new line of the record `signals` on to the wrapper, until that ends. This is a child
# of it. A line without an end is still being written. The pause is a child too, and must not stay behind. A TERM that
# comes before there is a trap for it may be lost: the last record of the wrapper says the same.
spool_watch_signals() {
    trap - EXIT HUP USR1 USR2
    trap 'kill "$!"; wait "$!"; exit 0' TERM
    while kill -0 "$$" && [ ! -e "$spool_records/rc" ] && [ ! -e "$spool_records/refused" ]; do
        spool_count=0
        if [ -f "$spool_records/signals" ] && [ ! -h "$spool_records/signals" ]; then
            while IFS= read -r spool_line; do
                spool_count=$((spool_count + 1))
                if [ "$spool_count" -le "$spool_seen" ]; then continue; fi
                spool_seen=$spool_count
                case $spool_line in
                HUP | INT | QUIT | TERM | USR1 | USR2) kill -s "$spool_line" "$$" ;;
                esac
            done < "$spool_records/signals"
        fi
        sleep 1 &
        wait "$!"
    done
}

# spool_stop_watching: end that child, and its pause.
spool_stop_watching() {
    if [ -n "$spool_watcher" ]; then
        kill -s TERM "$spool_watcher"
        spool_interrupted=yes
        while [ -n "$spool_interrupted" ]; do # a trap that ran has cut the wait short
            spool_interrupted=''
            wait "$spool_watcher"
        done
        spool_watcher=''
    fi
}

# spool_find PROGRAM: true if it can be executed; else spool_code is 126 or 127 and spool_why says why.
spool_find() {
    spool_code=127 spool_why='no such file'
    case $1 in
    */*) spool_places='' ;;
    *) spool_places="${PATH-/bin:/usr/bin}:" spool_why="not found in PATH ${PATH-}" ;;
    esac
    if [ -z "$spool_places" ]; then
        spool_can_execute "$1"
        return
    fi
    while [ -n "$spool_places" ]; do
        spool_place=${spool_places%%:*} spool_places=${spool_places#*:}
        if spool_can_execute "${spool_place:-.}/$1"; then return 0; fi
    done
    return 1
}

# spool_can_execute FILE: the test of spool_find for one file.
spool_can_execute() {
    [ -e "$1" ] || return 1
    spool_code=126
    if [ -d "$1" ]; then
        spool_why='it is a directory'
    elif [ -x "$1" ]; then
        return 0
    else
        spool_why='it may not be executed'
    fi
    return 1
}

# spool_add_variables: export what the record `env` says, to which texts before the command append. A text after it has
# to run whatever that says, and leaves out what is wrong.
spool_add_variables() {
    spool_count=0 spool_size=0 spool_why=''
    if spool_astray || spool_in_the_way env; then
        spool_why='is not a file'
    elif [ -e "$spool_records/env" ]; then
        while IFS= read -r spool_line || [ -n "$spool_line" ]; do
            spool_add_variable
            if [ -n "$spool_why" ] && [ -z "$spool_late" ]; then break; fi
        done < "$spool_records/env"
    fi
    if [ -z "$spool_why" ] || [ -n "$spool_late" ]; then return; fi
    spool_fail 125 "cannot run the command: \$SPOOL_ENV $spool_why" 5>&2 2> /dev/null
    exit 125
}

# spool_add_variable: export spool_line, or let spool_why say what is wrong with it. A program that is given more than it
# can take could not be told from one that the machine refuses, so there are limits, for characters of up to four bytes.
spool_add_variable() {
    spool_count=$((spool_count + 1)) spool_size=$((spool_size + ${#spool_line}))
    spool_key=${spool_line%%=*}
    if [ "$spool_count" -gt 1000 ] || [ "$spool_size" -gt 65536 ] || [ "${#spool_line}" -gt 32767 ]; then
        spool_why="has more than 1000 lines, more than 64 KiB, or a line of more than 32 KiB"
        return
    fi
    case $spool_line in
    '' | '#'*) return ;;
    esac
    case $spool_key in
    "$spool_line" | '' | [0-9]* | *[!A-Za-z0-9_]*) spool_why="has a line $spool_count that is not KEY=VALUE" ;;
    SPOOL_* | CUDA_VISIBLE_DEVICES | CUDA_DEVICE_ORDER)
        spool_why="has $spool_key in line $spool_count, which spool sets itself"
        ;;
    IFS | PWD | OLDPWD | OPTIND | OPTARG | OPTERR | PPID | _ | LINENO | PS[0-9] | ENV | FUNCNEST | POSIXLY_CORRECT | \
        EUID | UID | SHLVL | GROUPS | BASH* | SHELLOPTS | FUNCNAME | DIRSTACK | RANDOM | SRANDOM | SECONDS | EPOCH* | \
        PIPESTATUS | HISTCMD | COMP_* | spool_*)
        spool_why="has $spool_key in line $spool_count, which the shell keeps for itself"
        ;;
    *) export "$spool_key=${spool_line#*=}" ;;
    esac
}

# spool_exec ARGUMENT...: the last step of a child, called by spool_environment: turn into the command.
spool_exec() {
    if [ -n "$spool_added" ]; then spool_add_variables; fi
    case $spool_phase in
    init | prolog | prep) export SPOOL_ENV="$spool_metadir/env" ;;
    esac
    if ! spool_find "$spool_program"; then
        spool_fail "$spool_code" "cannot run the $spool_phase: $spool_program: $spool_why" 5>&2 2> /dev/null
        exit "$spool_code"
    fi
    if [ -n "$spool_nicer" ] && spool_find nice; then set -- nice -n "$spool_nicer" -- "$@"; fi
    if [ -x "$spool_become" ]; then spool_env=$spool_become spool_reset=--default-signal=INT,QUIT; fi
    # A shell without job control starts asynchronous children with SIGINT and SIGQUIT ignored. Only bash
    # lets a trap undo that; elsewhere another program has to.
    if [ -n "${BASH_VERSION-}" ]; then
        trap - INT QUIT
        spool_reset='' spool_own='-u SHLVL -u _' # which bash itself puts there
    fi
    case $spool_program in
    -*) spool_odd=yes ;; # not every exec knows the argument `--`
    /bin/sh) trap 'spool_not_executed "$spool_program"' EXIT ;;
    esac
    if [ -n "$spool_reset$spool_odd$spool_own" ]; then
        # Without a language to load env starts in four fifths of the time; the command gets its own back.
        if [ -n "${LC_ALL+set}" ]; then
            set -- -- "LC_ALL=$LC_ALL" "$@"
        else
            set -- -u LC_ALL -- "$@"
        fi
        export LC_ALL=C
        trap 'spool_not_executed "$spool_env"' EXIT
        # shellcheck disable=SC2086  # to be split
        exec "$spool_env" ${spool_reset:+"$spool_reset"} $spool_own "$@" 8<&-
    fi
    exec "$@" 8<&-
}

# spool_not_executed PROGRAM: the end of a child that could not turn into a program which is known to be sound.
spool_not_executed() {
    trap - EXIT
    spool_records=$spool_metadir # as 8 is closed
    if [ -z "$spool_late" ]; then
        spool_record refused "cannot start the $spool_phase: the machine cannot execute $1"
    fi
    exit 75
}

# spool_enter ARGUMENT...: the first step of a child.
spool_enter() {
    ${spool_umask:+umask "$spool_umask"}
    for spool_limit in $spool_limits; do
        # shellcheck disable=SC3045  # every shell that may run this has the soft limits
        ulimit -S "-${spool_limit%%=*}" "${spool_limit#*=}" 2> /dev/null # if this fails, the hard one is lower
    done
    if [ -n "$spool_late" ]; then
        export SPOOL_EXIT_CODE="$spool_result"
    elif [ -e "$spool_records/stop" ] || [ -e "$spool_records/signal" ]; then
        exit 143 # the run was stopped before this child could hear of it
    fi
    spool_environment "$@"
}

# spool_run PHASE PROGRAM ARGUMENT...: run a child and wait for it; its exit code is left in spool_code.
spool_run() {
    spool_program=$2
    if [ -z "$spool_late" ] && [ "$spool_ended" -ne 0 ]; then
        spool_code=$spool_ended # not before: the signal may come between any two steps
        return
    fi
    spool_before=$! spool_phase=$1
    shift
    # shellcheck disable=SC2016  # for that shell to expand
    case $spool_program in
    *=*) set -- /bin/sh -c 'exec "$@"' sh "$@" ;; # env would take such a name for a variable
    esac
    spool_starting=yes
    spool_enter "$@" <&3 >&4 2>&5 3<&- 4>&- 5>&- 6>&- 7<&- &
    spool_child=$! spool_starting=''
    if [ -z "$spool_announced" ]; then
        spool_announced=yes
        spool_record status running # while the child gets ready
    fi
    if [ -n "$spool_pending" ]; then
        kill -s "$spool_pending" "$spool_child"
        spool_pending=''
    fi
    while :; do
        spool_interrupted=''
        wait "$spool_child"
        spool_code=$?
        if [ -z "$spool_interrupted" ]; then break; fi
        # A trap ran: either the wait was cut short, or the child ended at the same time.
        if kill -0 "$spool_child"; then continue; fi
        # It is gone; what it ended with was given by this wait, or will be by the next. "Not known" is 127, and
        # in bash sometimes -1.
        spool_first=$spool_code
        wait "$spool_child"
        spool_code=$?
        case $spool_code in
        127 | -*) spool_code=$spool_first ;;
        esac
        break
    done
    spool_child=''
    if [ "$spool_code" -eq 75 ] && [ -z "$spool_late" ] && [ -e "$spool_records/refused" ]; then
        spool_go_back
    fi
}

# spool_into DIRECTORY: enter it; if that fails, spool_why says why.
spool_into() {
    case $1 in
    /*) ;;
    *)
        spool_why='it is not absolute'
        return 1
        ;;
    esac
    cd -- "$1" && unset OLDPWD && return # where it was started is none of the job's business
    if [ ! -e "$1" ]; then
        spool_why='no such directory'
    elif [ ! -d "$1" ]; then
        spool_why='it is not a directory'
    else
        spool_why='it may not be entered'
    fi
    return 1
}

# spool_before PHASE TEXT: run what comes before the command; once something has failed, nothing of it.
spool_before() {
    if [ "$spool_code" -ne 0 ]; then return; fi
    spool_added=yes
    spool_run "$1" "$spool_shell" -c "$2"
    if [ "$spool_code" -ne 0 ] && [ ! -e "$spool_records/error" ]; then
        spool_fail "$spool_code" "cannot run the command: the $1 ended with exit code $spool_code"
    fi
}

# spool_after PHASE TEXT: run what comes after the command, whatever became of that; its exit code changes nothing.
spool_after() {
    spool_result=$spool_code
    spool_late=yes
    spool_run "$1" "$spool_shell" -c "$2"
    spool_code=$spool_result
}

# spool_phases COMMAND...: everything between the first record and the last.
spool_phases() {
    spool_opened=yes
    ${spool_umask:+umask go-w}
    if ! spool_into "$spool_workdir"; then
        spool_fail 125 "cannot enter the workdir: $spool_workdir: $spool_why"
        return
    fi
    if [ -n "$spool_init" ]; then spool_before init "$spool_init"; fi
    if [ -n "$spool_prolog" ]; then spool_before prolog "$spool_prolog"; fi
    if [ -n "$spool_prep" ]; then spool_before prep "$spool_prep"; fi
    if [ "$spool_code" -eq 0 ]; then
        spool_run command "$@"
    fi
    spool_done=yes
    if [ -n "$spool_end" ]; then spool_after end "$spool_end"; fi # it may say why the command ended, by `stop`
    if [ -n "$spool_epilog" ]; then
        spool_record ended "$spool_code" # nothing that follows changes it
        spool_after epilog "$spool_epilog"
    fi
}

# spool_parent FILE: make the directory that it lies in.
spool_parent() {
    [ -d "${1%/*}" ] || mkdir -p -- "${1%/*}"
}

# spool_within FUNCTION ARGUMENT...: open what the children read, as 3, and what they write to, as 4 and 5, and go on.
spool_within() {
    if [ -n "$spool_stdin" ]; then
        { spool_with_outputs "$@"; } 3< "$spool_stdin"
    else
        { spool_with_outputs "$@"; } 3<&0
    fi
}

# spool_with_outputs FUNCTION ARGUMENT...: the second half of that.
spool_with_outputs() {
    if [ -z "$spool_stdout" ]; then
        { "$@"; } 4>&1
        return
    fi
    case $spool_stdout:$spool_stderr in
    "$spool_metadir"/* | *:"$spool_metadir"/*) ;;
    *) ${spool_umask:+umask "$spool_umask"} ;; # they are the job's own
    esac
    spool_parent "$spool_stdout"
    if [ -z "$spool_stderr" ]; then
        { "$@"; } 4>> "$spool_stdout" 5>&4
    else
        spool_parent "$spool_stderr"
        { "$@"; } 4>> "$spool_stdout" 5>> "$spool_stderr"
    fi
}

# spool_not_opened FILE NAME: if FILE may be what could not be opened, say why and be true.
spool_not_opened() {
    if [ -z "$1" ]; then
        return 1
    elif [ -d "$1" ]; then
        spool_why='it is a directory'
    elif [ ! -d "${1%/*}" ]; then
        spool_why='its directory is not there and cannot be made'
    elif [ ! -e "$1" ]; then
        spool_why='it cannot be created'
    elif [ ! -w "$1" ]; then
        spool_why='it may not be written'
    else
        return 1
    fi
    spool_fail 125 "cannot open $2: $1: $spool_why"
}

# spool_leave: a shell to which the machine refuses a process ends there and then (bash after 15 seconds), and this is
# what it does last. Whether the command has begun says `$!`: it is another one as soon as the process is there.
spool_leave() {
    trap - EXIT
    if [ -n "$spool_done" ]; then
        if [ -n "$spool_late" ]; then
            spool_code=$spool_result
            spool_within spool_say "the $spool_phase was not run: the machine refused a process for it"
        fi
        spool_finish
    elif [ "$spool_phase" != command ] || [ "$!" = "$spool_before" ]; then
        spool_record refused "cannot start ${spool_phase:+the }${spool_phase:-it}: the machine refuses another process"
        spool_go_back
    fi
}

# spool_go_back: end without an exit code. Nothing of the command has begun, and the record `refused` says so.
spool_go_back() {
    trap - EXIT
    spool_record status queued
    spool_code=75
    if [ -n "$spool_announced" ] && [ -n "$spool_epilog" ]; then spool_within spool_after epilog "$spool_epilog"; fi
    spool_stop_watching
    exit 75
}

# spool_say TEXT: write a line to the log.
spool_say() {
    printf 'spool: %s\n' "$1" >&5
}

# spool_usage: write down what the run has used. Nothing depends on it. A shell knows the CPU time of its children, and
# what its control group says, if it has one of its own: that of its engine's job, or the one that it was to enter.
spool_usage() {
    spool_cpu='' spool_peak=''
    if [ -n "$spool_cgroup" ]; then spool_group "${spool_cgroup%/*}"; fi
    if [ -n "$spool_engine" ]; then spool_groups_of_job; fi
    if [ -z "$spool_cpu" ]; then
        if spool_astray || spool_in_the_way usage; then return; fi
        { times; } > "$spool_records/usage" || return
        { read -r spool_line && read -r spool_user spool_system; } < "$spool_records/usage" || return
        # A umask of the job may have made it a file that cannot be written again.
        if [ ! -w "$spool_records/usage" ]; then command eval 'rm -f -- "$spool_records/usage"'; fi
        spool_cpu=0
        spool_add_time "$spool_user" && spool_add_time "$spool_system" || spool_cpu=''
    fi
    spool_line=''
    if [ -n "$spool_cpu" ]; then spool_line="cpu_time_ns = $spool_cpu"; fi
    if [ -n "$spool_peak" ]; then
        spool_line="${spool_line}${spool_line:+$spool_newline}peak_memory_bytes = $spool_peak"
    fi
    spool_record usage "$spool_line"
}

# spool_add_time TIME: add what `times` says, as 1m2.340s, to spool_cpu.
spool_add_time() {
    spool_minutes=${1%%m*} spool_seconds=${1#*m}
    spool_part=${spool_seconds%s} spool_seconds=${spool_seconds%%[.,]*}
    spool_part=${spool_part#*[.,]}000000000
    spool_part=${spool_part%"${spool_part#?????????}"} # nine digits
    # A zero before other digits would make an octal number of them; so does the 1 keep the part from being one.
    case $spool_minutes.$spool_seconds.$spool_part in
    *[!0-9.]* | .* | *..* | 0[0-9]* | *.0[0-9]*.* | ??????????.*) return 1 ;;
    esac
    spool_cpu=$((spool_cpu + (spool_minutes * 60 + spool_seconds) * 1000000000 + 1$spool_part - 1000000000))
}

# spool_groups_of_job: take what the control groups say that the engine has made for this job.
spool_groups_of_job() {
    while IFS=: read -r spool_line spool_kinds spool_place; do
        case $spool_place/ in
        */job_"$spool_id"/*) spool_place=${spool_place%%/job_"$spool_id"*}/job_$spool_id ;;
        *) continue ;;
        esac
        case $spool_kinds in
        '') spool_group "$spool_groups$spool_place" ;;
        *) spool_group "$spool_groups/$spool_kinds$spool_place" ;;
        esac
    done < /proc/self/cgroup
}

# spool_group DIRECTORY: take what that control group says.
spool_group() {
    if [ -r "$1/memory.peak" ]; then spool_file_number "$1/memory.peak" && spool_peak=$spool_number; fi
    if [ -r "$1/memory.max_usage_in_bytes" ]; then
        spool_file_number "$1/memory.max_usage_in_bytes" && spool_peak=$spool_number
    fi
    if [ -r "$1/cpu.stat" ]; then spool_file_number "$1/cpu.stat" usage_usec && spool_cpu=${spool_number}000; fi
    if [ -r "$1/cpuacct.usage" ]; then spool_file_number "$1/cpuacct.usage" && spool_cpu=$spool_number; fi
}

# spool_file_number FILE [KEY]: set spool_number to the number that the first line has, after KEY.
spool_file_number() {
    read -r spool_line < "$1" || return 1
    case $#$spool_line in
    2"$2 "*) spool_number=${spool_line#* } ;;
    1*) spool_number=$spool_line ;;
    *) return 1 ;;
    esac
    case $spool_number in
    '' | *[!0-9]*) return 1 ;;
    esac
}

# spool_gone: true if the metadir was removed. One that is held is still there for this process, but empty, and for good.
spool_gone() {
    if [ "$spool_records" = "$spool_metadir" ]; then
        [ ! -d "$spool_metadir" ]
    else
        [ ! -e "$spool_records/jid" ] && [ ! -e "$spool_records/run.sh" ]
    fi
}

# spool_alone: true if this process has no child. What the command has abandoned is one as well, as this process was made
# the child subreaper of the run before it became a shell. Where the kernel lists no children, no shell can tell.
spool_alone() {
    spool_line=''
    if [ -r "/proc/$$/task/$$/children" ]; then
        read -r spool_line < "/proc/$$/task/$$/children"
    else
        return 1
    fi
    [ -z "$spool_line" ]
}

# spool_outlast: stay until the last child has ended, which no order changes any more. A shell does not wait for children
# that it has not started, but reaps them as well while it waits for one that it has.
spool_outlast() {
    trap '' HUP INT QUIT TERM USR1 USR2
    trap - EXIT
    if [ -x "$spool_become" ]; then
        exec "$spool_become" reap "$spool_metadir/run.sh" "$spool_records/leftovers" "$spool_code"
    fi
    if [ ! -r "/proc/$$/task/$$/children" ]; then exit "$spool_code"; fi # the record tells the dispatcher to search
    until spool_alone; do command eval 'sleep 0.1' || command eval 'sleep 1'; done
    if ! spool_astray; then rm -f -- "$spool_records/leftovers"; fi
}

# spool_finish: the last records, and the end.
spool_finish() {
    # A process that sees the last status may send a signal: only what came before it is over.
    spool_done=yes spool_late='' spool_ended=0
    if [ "$spool_code" -ne 0 ] || spool_astray || spool_in_the_way status; then
        spool_record status failed
    else
        # Written over "running": a file that was cut to nothing is written to the disk as soon as it is
        # closed (ext4), which costs more than all the other records.
        printf '%s\n' finished 1<> "$spool_records/status"
    fi
    if [ -n "$spool_announced" ]; then spool_usage; fi
    # The exit code must not be lost to a disk that is full for a while. Where no process can be had to wait with,
    # this goes on without a pause; `command` keeps the shell alive then.
    spool_left=''
    if [ -z "$spool_engine" ] && ! spool_alone; then spool_left=yes; fi
    until { [ -z "$spool_left" ] || spool_record leftovers running; } && spool_record rc "$spool_code"; do
        if spool_gone || [ "$spool_ended" -ne 0 ]; then break; fi
        if [ -e "$spool_records/stop" ] && ! spool_astray; then break; fi
        if [ -s "$spool_records/usage" ] && ! spool_astray; then printf '' > "$spool_records/usage"; fi # it may have had the last room
        command eval 'sleep 1'
        spool_tries=$((spool_tries + 1))
        # If something else was put in its place, there was half a minute to take it away.
        if [ "$spool_tries" -ge 30 ] && ! spool_astray && spool_in_the_way rc; then
            command eval 'mv -f -- "$spool_records/rc" "$spool_records/rc.aside"'
        fi
    done
    spool_note rc
    if [ -n "$spool_left" ]; then spool_note leftovers; fi
    # A viewer that copies the outputs to the terminal has the other ends of 6 and 7. It is told of the end, and says
    # when it has shown the last of them; the terminal goes with this process.
    if [ "$spool_terminal" = own ]; then
        exec 6>&-
        read -r spool_line <&7
    fi
    spool_stop_watching
    if [ -n "$spool_left" ]; then spool_outlast; fi
    case " $spool_masked " in
    *" $spool_code "*) spool_code=1 ;; # the record has the code
    esac
    trap - EXIT
    exit "$spool_code"
}

# spool_start ARGUMENT...: the run, whose command they are. All that comes before only changes this shell.
spool_start() {
    spool_records=$spool_metadir # where the records are, which no move of the spool changes: spool_open_records

    # What the shell has to say of a failed step is said better by the records; the children get stderr as 5.
    exec 5>&2 2> /dev/null

    trap 'spool_signal HUP 129' HUP
    trap 'spool_signal INT 130' INT
    trap 'spool_signal QUIT 131' QUIT
    trap 'spool_signal TERM 143' TERM
    trap 'spool_signal USR1 0' USR1
    trap 'spool_signal USR2 0' USR2
    # What the keys of a shared terminal stop is the command: this only waits, and would be taken for stopped by mistake.
    if [ "$spool_terminal" = shared ]; then trap 'spool_interrupted=yes' TSTP TTIN TTOU; fi

    # The wrapper that creates the jid has the run; a later one exits at once: 17, or 73 if none could create it.
    spool_identify || exit 73
    ${spool_umask:+umask go-w}
    spool_open_records
    if [ -e "$spool_records/jid" ]; then exit 17; fi
    set -C
    {
        spool_created=yes
        printf '%s\n' "$spool_identity" || spool_created=broken
    } > "$spool_records/jid"
    set +C
    case $spool_created in
    yes) ;;
    broken)
        rm -f -- "$spool_records/jid"
        exit 73
        ;;
    *)
        if [ -e "$spool_records/jid" ]; then exit 17; fi
        exit 73
        ;;
    esac

    spool_note jid
    if [ -n "$spool_cgroup" ]; then
        printf '%s\n' "$$" > "$spool_cgroup" # if this fails, memory is watched by polling
    fi
    trap spool_leave EXIT
    # shellcheck disable=SC3045  # every shell that may run this has the soft limit
    if [ -n "$spool_files" ]; then ulimit -S -n "$spool_files"; fi
    if [ -n "$spool_watch" ]; then
        spool_watch_signals < /dev/null > /dev/null 5>&- &
        spool_watcher=$!
    fi
    spool_within spool_phases "$@"
    if [ -z "$spool_opened" ]; then
        spool_not_opened "$spool_stdout" stdout || spool_not_opened "$spool_stderr" stderr ||
            spool_fail 125 'cannot open stdin, stdout or stderr: is the disk full?'
    fi
    spool_finish
}

# --- assignments ---
# --- end of assignments ---
spool_start "$@"
