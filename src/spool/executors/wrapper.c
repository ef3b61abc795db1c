/* The wrapper of one run, compiled: it reads the same run.sh as a shell would, and does the same, without a shell.

       spool-wrapper run RUN_SH [ARGUMENT...]   what `/bin/sh RUN_SH [ARGUMENT...]` does
       spool-wrapper serve FD [ROOM]            that for each datagram on the socket FD, in a child of who started it
       spool-wrapper reap RUN_SH RECORD CODE    wait for the last child, remove RECORD, end with CODE: a shell's run.sh does
       spool-wrapper [--default-signal=INT,QUIT] [-u NAME] -- [NAME=VALUE...] PROGRAM [ARGUMENT...]
                                                what env is used for in run.sh
       spool-wrapper --version                  which source it was built from

   run.sh stays the truth. It names the file with its constant by a hash, which is compiled in and must be the same; this
   program does not read that file. The assignments have a grammar so simple that all of it is read here. A script with
   anything else turns this process into `/bin/sh RUN_SH` before it has touched anything, and so does a rare run: with
   texts before or after the command, a terminal, an engine, odd variables, an edited script, or ignored signals.
   formats/wrapper.sh says why each step is as it is, and this file follows it step by step; where the two differ in
   what they leave behind, this one is wrong.

   No signal interrupts anything: those that count are blocked and waited for, together with the end of the command.

   The start of a C library takes longer than a whole run here, so there is none where the processor is known:

       cc -O2 -static -nostdlib -fno-stack-protector -o spool-wrapper wrapper.c
       cc -O2 -DWITH_LIBC -o spool-wrapper wrapper.c    (any other processor)

   compiled.py adds which constant it is for: without that, every run is the shell's. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef SPOOL_SOURCE
#define SPOOL_SOURCE "unknown"
#endif
#ifndef SPOOL_CONSTANT
#define SPOOL_CONSTANT "unknown"
#endif

enum {
    MOST = 1 << 18,    /* bytes of a script, and of a request; a larger one is the shell's */
    LONGEST = 4000,    /* bytes of a path, so that the name of a record fits behind it */
    FAILED = 125,      /* exit codes: the workdir or an output; */
    NO_PERMISSION = 126,
    NOT_FOUND = 127,
    ALREADY_STARTED = 17,
    NO_JID = 73,
    REFUSED = 75,
    HELD = 8,          /* the descriptor of the metadir, by which a dispatcher knows the wrapper too */
    MOST_TRIES = 30    /* seconds for which something else may lie in the place of rc */
};

#define SHELL "/bin/sh"
#define DEFAULT_PATH "/bin:/usr/bin"

/* --- the kernel: every call returns its result, or -errno ------------------------------------------------------ */

#ifdef WITH_LIBC
static long result(long value) { return value < 0 ? -errno : value; }
#define EITHER(library, bare) result(library)
#else
#define EITHER(library, bare) (bare)
#define K(name, a, b, c, d, e) \
    kernel(SYS_##name, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e))

#if defined __x86_64__
static inline long kernel(long number, long a, long b, long c, long d, long e)
{
    register long fourth __asm__("r10") = d;
    register long fifth __asm__("r8") = e;
    register long sixth __asm__("r9") = 0;
    long value;
    __asm__ volatile("syscall"
                     : "=a"(value)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(fourth), "r"(fifth), "r"(sixth)
                     : "rcx", "r11", "memory");
    return value;
}
__asm__(".text\n.globl _start\n_start:\n\tmov %rsp, %rdi\n\tand $-16, %rsp\n\tcall begin\n");
#elif defined __aarch64__
static inline long kernel(long number, long a, long b, long c, long d, long e)
{
    register long which __asm__("x8") = number;
    register long first __asm__("x0") = a;
    register long second __asm__("x1") = b;
    register long third __asm__("x2") = c;
    register long fourth __asm__("x3") = d;
    register long fifth __asm__("x4") = e;
    register long sixth __asm__("x5") = 0;
    __asm__ volatile("svc 0"
                     : "+r"(first)
                     : "r"(which), "r"(second), "r"(third), "r"(fourth), "r"(fifth), "r"(sixth)
                     : "memory");
    return first;
}
__asm__(".text\n.globl _start\n_start:\n\tmov x0, sp\n\tbl begin\n");
#else
#error "the system calls of this processor are not written down here: compile with -DWITH_LIBC"
#endif

/* The compiler calls these by itself. */
void *memcpy(void *restrict to, const void *restrict from, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        ((char *)to)[i] = ((const char *)from)[i];
        __asm__ volatile("" ::: "memory"); /* else it finds out what this loop is, and calls itself */
    }
    return to;
}

void *memset(void *to, int value, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        ((char *)to)[i] = (char)value;
        __asm__ volatile("" ::: "memory");
    }
    return to;
}
#endif

typedef struct {
    uint64_t bits;
} Signals; /* as the kernel has them */

#define BIT(number) (UINT64_C(1) << ((number) - 1))

/* What is opened, asked for and removed by a name alone is in the directory *in*. */
static long k_open_in(int in, const char *path, int flags)
{
    long fd;
    do /* what a server of files may answer to a process that was stopped and goes on */
        fd = EITHER(openat(in, path, flags | O_CLOEXEC, 0666), K(openat, in, path, flags | O_CLOEXEC, 0666, 0));
    while (fd == -EINTR);
    return fd;
}
static long k_open(const char *path, int flags) { return k_open_in(AT_FDCWD, path, flags); }
static long k_read(long fd, void *to, size_t n) { return EITHER(read((int)fd, to, n), K(read, fd, to, n, 0, 0)); }
static long k_write(long fd, const void *from, size_t n)
{
    return EITHER(write((int)fd, from, n), K(write, fd, from, n, 0, 0));
}
static long k_close(long fd) { return EITHER(close((int)fd), K(close, fd, 0, 0, 0, 0)); }
static long k_stat_in(int in, const char *path, int flags, struct stat *to)
{
    return EITHER(fstatat(in, path, to, flags), K(newfstatat, in, path, to, flags, 0));
}
static long k_stat(const char *path, int flags, struct stat *to) { return k_stat_in(AT_FDCWD, path, flags, to); }
static long k_access_in(int in, const char *path, int mode)
{
    return EITHER(faccessat(in, path, mode, 0), K(faccessat, in, path, mode, 0, 0));
}
static long k_access(const char *path, int mode) { return k_access_in(AT_FDCWD, path, mode); }
static long k_mkdir(const char *path) { return EITHER(mkdir(path, 0777), K(mkdirat, AT_FDCWD, path, 0777, 0, 0)); }
static long k_unlink_in(int in, const char *path) { return EITHER(unlinkat(in, path, 0), K(unlinkat, in, path, 0, 0, 0)); }
static long k_rename_in(int in, const char *from, const char *to)
{
    return EITHER(renameat(in, from, in, to), K(renameat, in, from, in, to, 0));
}
static long k_chdir(const char *path) { return EITHER(chdir(path), K(chdir, path, 0, 0, 0, 0)); }
static long k_umask(int mask) { return EITHER(umask((mode_t)mask), K(umask, mask, 0, 0, 0, 0)); }
static long k_dup(long fd, int to) { return EITHER(dup2((int)fd, to), K(dup3, fd, to, 0, 0, 0)); }
static long k_dup_own(long fd, int to) { return EITHER(dup3((int)fd, to, O_CLOEXEC), K(dup3, fd, to, O_CLOEXEC, 0, 0)); }
static long k_pipe(int ends[2]) { return EITHER(pipe2(ends, O_CLOEXEC), K(pipe2, ends, O_CLOEXEC, 0, 0, 0)); }
static long k_flags(int fd) { return EITHER(fcntl(fd, F_GETFD), K(fcntl, fd, F_GETFD, 0, 0, 0)); }
static long k_setsid(void) { return EITHER(setsid(), K(setsid, 0, 0, 0, 0, 0)); }
static long k_kill(long pid, int number) { return EITHER(kill((pid_t)pid, number), K(kill, pid, number, 0, 0, 0)); }
static long k_wait(int *status, int options, struct rusage *used)
{
    return EITHER(wait4(-1, status, options, used), K(wait4, -1, status, options, used, 0));
}
static long k_become_subreaper(void)
{
    return EITHER(prctl(PR_SET_CHILD_SUBREAPER, 1L, 0L, 0L, 0L), K(prctl, PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0));
}
static long k_execve(const char *path, char **words, char **environment)
{
    return EITHER(execve(path, words, environment), K(execve, path, words, environment, 0, 0));
}
static long k_receive(long fd, void *to, size_t n)
{
    return EITHER(recv((int)fd, to, n, MSG_TRUNC), K(recvfrom, fd, to, n, MSG_TRUNC, 0));
}
static long k_send(long fd, const void *from, size_t n)
{
    return EITHER(send((int)fd, from, n, MSG_NOSIGNAL), K(sendto, fd, from, n, MSG_NOSIGNAL, 0));
}
static long k_limits(int which, struct rlimit *found, const struct rlimit *wanted)
{
    return EITHER(prlimit(0, which, wanted, found), K(prlimit64, 0, which, wanted, found, 0));
}
static void k_nicer(int by)
{
    EITHER(setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + by),
           K(setpriority, PRIO_PROCESS, 0, 20 - K(getpriority, PRIO_PROCESS, 0, 0, 0, 0) + by, 0, 0));
}

static _Noreturn void k_exit(int code)
{
#ifdef WITH_LIBC
    _exit(code);
#else
    for (;;)
        K(exit_group, code, 0, 0, 0, 0);
#endif
}

/* A child whose parent is ours, so that our parent is told its end and what it has used. */
static long k_sibling(void)
{
#if defined WITH_LIBC && defined __s390x__
    return result(syscall(SYS_clone, 0L, (long)(CLONE_PARENT | SIGCHLD), 0L, 0L, 0L));
#else
    return EITHER(syscall(SYS_clone, (long)(CLONE_PARENT | SIGCHLD), 0L, 0L, 0L, 0L),
                  K(clone, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0));
#endif
}

/* A child that has our memory until it executes a program or ends; until then we stand still. It must not return. */
#ifdef WITH_LIBC
#define K_VFORK() result(vfork())
#else
#define K_VFORK() K(clone, CLONE_VFORK | CLONE_VM | SIGCHLD, 0, 0, 0, 0)
#endif

#ifdef WITH_LIBC
static void translate(const Signals *from, sigset_t *to)
{
    sigemptyset(to);
    for (int number = 1; number <= 64; number++)
        if (from->bits & BIT(number))
            sigaddset(to, number);
}
#endif

static Signals k_mask(int how, Signals set)
{
    Signals before = {0};
#ifdef WITH_LIBC
    sigset_t given, found;
    translate(&set, &given);
    sigprocmask(how, &given, &found);
    for (int number = 1; number <= 64; number++)
        if (sigismember(&found, number) == 1)
            before.bits |= BIT(number);
#else
    K(rt_sigprocmask, how, &set, &before, sizeof set, 0);
#endif
    return before;
}

/* Wait for one of *set*, for at most that many seconds; -1: as long as it takes. */
static long k_sigwait(Signals set, long seconds)
{
    const struct timespec most = {.tv_sec = seconds};
#ifdef WITH_LIBC
    sigset_t given;
    translate(&set, &given);
    return result(sigtimedwait(&given, NULL, seconds < 0 ? NULL : &most));
#else
    return K(rt_sigtimedwait, &set, 0, seconds < 0 ? NULL : &most, sizeof set, 0);
#endif
}

static int k_ignored(int number)
{
#ifdef WITH_LIBC
    struct sigaction found;
    return sigaction(number, NULL, &found) == 0 && found.sa_handler == SIG_IGN;
#else
    uint64_t found[4] = {0}; /* the handler comes first */
    return K(rt_sigaction, number, 0, found, sizeof(Signals), 0) == 0 && found[0] == (uint64_t)SIG_IGN;
#endif
}

static void k_default(int number)
{
#ifdef WITH_LIBC
    signal(number, SIG_DFL);
#else
    const uint64_t wanted[4] = {0};
    K(rt_sigaction, number, wanted, 0, sizeof(Signals), 0);
#endif
}

/* --- texts ----------------------------------------------------------------------------------------------------- */

static size_t length(const char *text)
{
    size_t n = 0;
    while (text[n])
        n++;
    return n;
}

static int same_bytes(const char *one, const char *other, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (one[i] != other[i])
            return 0;
    return 1;
}

static int same(const char *one, const char *other)
{
    while (*one && *one == *other)
        one++, other++;
    return *one == *other;
}

/* Return what comes after *start* in *text*; NULL if it does not begin with it. */
static char *after(const char *text, const char *start)
{
    while (*start)
        if (*text++ != *start++)
            return NULL;
    return (char *)text;
}

static int has(const char *text, char sought)
{
    for (; *text; text++)
        if (*text == sought)
            return 1;
    return 0;
}

/* Append, and return the new end. The room is the caller's business. */
static char *add(char *end, const char *text)
{
    while (*text)
        *end++ = *text++;
    *end = 0;
    return end;
}

static char *add_number(char *end, unsigned long value)
{
    char digits[24], *at = digits + sizeof digits - 1;
    *at = 0;
    do
        *--at = (char)('0' + value % 10);
    while (value /= 10);
    return add(end, at);
}

static int write_all(long fd, const char *text, size_t n)
{
    while (n) {
        long wrote = k_write(fd, text, n);
        if (wrote == -EINTR)
            continue;
        if (wrote <= 0)
            return 0;
        text += wrote;
        n -= (size_t)wrote;
    }
    return 1;
}

static void say(const char *text) { write_all(2, text, length(text)); }

/* --- what run.sh says ------------------------------------------------------------------------------------------ */

#define READING "#!/bin/sh\n" \
    "# The wrapper of one run: what differs from run to run. It may be run by hand.\n" \
    "command . "
#define CONSTANT "/.wrapper/" SPOOL_CONSTANT
#define HOLE " || exit 73\n# --- assignments ---\n"
#define END "# --- end of assignments ---\nspool_start \"$@\"\n"

static char script[MOST + 1];
static char *at; /* as far as it is read */

static const char *metadir, *boot, *pid_namespace, *host, *workdir, *in, *out, *err, *cgroup;
static const char *limits; /* of the command: LETTER=NUMBER, with blanks between */
static long nicer;         /* what is added to its niceness */
static long files;         /* the limit; 0: as it is */
static int own_mask;       /* the umask of the command; -1: as it is */

static char *slots[MOST / 3 + 4], **words = slots + 1; /* the command; one more word fits before it */
static char *variables[MOST / 2 + 4];                  /* its environment */
static size_t how_many_variables;
static char *exports[MOST / 8 + 1]; /* those that the script sets */
static size_t how_many_exports;

/* The name of a variable, up to its equals sign; 0: a shell would not take it for one. */
static size_t name_of(const char *text)
{
    size_t n = 0;
    while (text[n] == '_' || (text[n] >= 'a' && text[n] <= 'z') || (text[n] >= 'A' && text[n] <= 'Z') ||
           (n && text[n] >= '0' && text[n] <= '9'))
        n++;
    return text[n] == '=' ? n : 0;
}

/* Whether a variable means something to a shell, so that it may neither import nor export it as it is. */
static int is_special(const char *text)
{
    static const char *const names[] = {"IFS=", "PWD=", "OLDPWD=", "OPTIND=", "OPTARG=", "OPTERR=", "PPID=", "_=",
        "LINENO=", "SHLVL=", "ENV=", "FUNCNEST=", "POSIXLY_CORRECT=", "EUID=", "UID=", "GROUPS=", "SHELLOPTS=", "FUNCNAME=",
        "DIRSTACK=", "SRANDOM=", "RANDOM=", "SECONDS=", "PIPESTATUS=", "HISTCMD=", "BASH", "EPOCH", "COMP_", "spool_"};
    const char *prompt = after(text, "PS");
    if (prompt && *prompt >= '0' && *prompt <= '9' && prompt[1] == '=')
        return 1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (after(text, names[i]))
            return 1;
    return 0;
}

static int skip(const char *text)
{
    char *end = after(at, text);
    if (end)
        at = end;
    return end != NULL;
}

/* Read a word in single quotes, put what it means at *to*, which is not after it, and return that; NULL: it is none. */
static char *quoted(char *to)
{
    char *const word = to;
    if (!skip("'"))
        return NULL;
    while (*at != '\'' || after(at, "'\\''")) {
        if (!*at)
            return NULL;
        if (*at == '\'')
            at += 3;
        *to++ = *at++;
    }
    at++;
    *to = 0;
    return word;
}

/* A whole number in that base, which is all of *text*; -1: it is none. */
static long number_in(const char *text, int base)
{
    long value = 0;
    size_t n = 0;
    for (; text[n]; n++) {
        if (text[n] < '0' || text[n] >= '0' + base || n == 9)
            return -1;
        value = value * base + (text[n] - '0');
    }
    return n ? value : -1;
}

static int ends(const char *text, const char *end)
{
    const size_t n = length(text), most = length(end);
    return n >= most && same(text + n - most, end);
}

/* Whether the last part of *path* is *name*. */
static int is_called(const char *path, const char *name)
{
    const char *last = path;
    for (; *path; path++)
        if (*path == '/')
            last = path + 1;
    return same(last, name);
}

/* Take one assignment; return whether it can be done here. */
static int assign(const char *name, const char *value)
{
    static const struct {
        const char *name, **place; /* without a place it has to be empty */
    } texts[] = {{"metadir", &metadir}, {"boot", &boot}, {"pid_namespace", &pid_namespace}, {"host", &host},
        {"workdir", &workdir}, {"limits", &limits}, {"stdin", &in}, {"stdout", &out}, {"stderr", &err}, {"cgroup", &cgroup},
        {"init", NULL}, {"prolog", NULL}, {"prep", NULL}, {"end", NULL}, {"epilog", NULL}, {"terminal", NULL},
        {"engine", NULL}, {"node_in", NULL}, {"id_in", NULL}, {"masked", NULL}, {"watch", NULL}};
    if (same(name, "shell"))
        return 1; /* of those texts */
    if (same(name, "env") || same(name, "become")) /* a shell's helpers, unless somebody put another program there */
        return !*value || is_called(value, *name == 'e' ? "env" : "spool-wrapper");
    if (same(name, "reset"))
        return !*value || same(value, "--default-signal=INT,QUIT");
    if (same(name, "files")) {
        files = *value ? number_in(value, 10) : 0;
        return !*value || files >= 32; /* with less, a shell cannot open what it needs */
    }
    if (same(name, "nicer")) {
        const long size = number_in(value + (*value == '-'), 10);
        nicer = *value == '-' ? -size : size;
        return size >= 0;
    }
    if (same(name, "umask")) {
        own_mask = *value ? (int)number_in(value, 8) : -1;
        return !*value || (own_mask >= 0 && own_mask <= 0777);
    }
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (same(name, texts[i].name)) {
            if (texts[i].place)
                *texts[i].place = value;
            return texts[i].place || !*value;
        }
    return 0;
}

/* Read the assignments and see that nothing but the constant stands around them. */
static int read_assignments(size_t size)
{
    const size_t rest = sizeof END - 1;
    metadir = boot = pid_namespace = host = out = err = cgroup = limits = "";
    workdir = "/", in = "/dev/null", files = 0, nicer = 0, own_mask = -1, how_many_exports = 0;
    at = script;
    const char *const constant = skip(READING) ? quoted(at) : NULL;
    if (!constant || !ends(constant, CONSTANT) || !skip(HOLE))
        return 0;
    while (!skip("spool_environment() {\n")) {
        if (!skip("spool_"))
            return 0;
        char *name = at;
        while ((*at >= 'a' && *at <= 'z') || *at == '_')
            at++;
        if (*at != '=')
            return 0;
        *at++ = 0;
        char *value = quoted(at);
        if (!value || !skip("\n") || !assign(name, value))
            return 0;
    }
    while (skip("export ")) {
        char *variable = at;
        size_t n = name_of(at);
        if (!n || is_special(at))
            return 0;
        at += n + 1;
        if (!quoted(at) || !skip("\n"))
            return 0;
        exports[how_many_exports++] = variable;
    }
    if (!skip("spool_exec \"$@\"\n}\nset --"))
        return 0;
    size_t n = 0;
    while (skip(" "))
        if (!(words[n++] = quoted(at)))
            return 0;
    words[n] = NULL;
    return n && skip("\n") && (size_t)(script + size - at) == rest && same_bytes(at, END, rest);
}

/* An absolute path that names the same directory to a shell, which walks it in its head, as to the kernel. */
static int is_plain_path(const char *path)
{
    const char *const whole = path;
    if (*path != '/' || length(path) > LONGEST)
        return 0;
    while (*path && !same(path, "/")) {
        const char *const part = path + 1;
        size_t n = 0;
        while (part[n] && part[n] != '/')
            n++;
        if (!n || (part[0] == '.' && (n == 1 || (n == 2 && part[1] == '.'))))
            return 0;
        path = part + n;
    }
    return !*path || path == whole;
}

/* To open something else may take as long as it likes, and nothing is heard then. */
static int is_plain_output(const char *path)
{
    struct stat found;
    if (!*path || same(path, "/dev/null"))
        return 1;
    if (*path != '/' || length(path) > LONGEST || (own_mask >= 0 && has(path, ':')))
        return 0;
    return k_stat(path, 0, &found) < 0 || S_ISREG(found.st_mode) || S_ISDIR(found.st_mode);
}

static void set_variable(char *variable)
{
    const size_t n = name_of(variable) + 1;
    size_t i = 0;
    while (i < how_many_variables && !same_bytes(variables[i], variable, n))
        i++;
    variables[i] = variable;
    if (i == how_many_variables)
        how_many_variables++;
    variables[how_many_variables] = NULL;
}

static const char *value_of(char **environment, const char *name)
{
    for (; *environment; environment++) {
        const char *value = after(*environment, name);
        if (value)
            return value;
    }
    return NULL;
}

/* Make the environment of the command, as a shell does that is given *environment*, changes to the workdir, forgets
   where it was before, and exports what the script says. */
static int set_environment(char **environment)
{
    static const char *const own[] = {"SPOOL_DIR=", "SPOOL_JOB=", "SPOOL_RUN=", "SPOOL_ATTEMPT=", "SPOOL_METADIR=",
        "SPOOL_CPUS=", "SPOOL_CPU_LIST=", "SPOOL_MEMORY_MB=", "SPOOL_GPUS=", "SPOOL_GPU_INDICES=", "SPOOL_ARRAY_INDEX=",
        "SPOOL_EXIT_CODE=", "SPOOL_ENV=", "SPOOL_SERVICE="};
    static char now[LONGEST + 32] = "PWD=";
    how_many_variables = 0;
    variables[0] = NULL;
    for (size_t n = 0; environment[n]; n++) {
        char *given = environment[n];
        size_t i = 0;
        if (!name_of(given) || n + how_many_exports + 3 > sizeof variables / sizeof *variables ||
            (is_special(given) && !after(given, "PWD=") && !after(given, "OLDPWD=") && !after(given, "_=") &&
                !after(given, "SHLVL=")))
            return 0;
        while (i < sizeof own / sizeof *own && !after(given, own[i]))
            i++;
        if (i == sizeof own / sizeof *own && !after(given, "OLDPWD=") && !after(given, "SHLVL=") && !after(given, "_="))
            set_variable(given);
    }
    add(now + 4, workdir);
    set_variable(now);
    for (size_t i = 0; i < how_many_exports; i++)
        set_variable(exports[i]);
    return 1;
}

/* Read the script; return whether what it says can be done here. Nothing has been touched by then. */
static int understand(const char *path, char **environment)
{
    const long fd = k_open(path, O_RDONLY), size = fd < 0 ? fd : k_read(fd, script, MOST); /* a part of it will not do */
    if (fd >= 0)
        k_close(fd);
    if (size < 0 || size >= MOST)
        return 0;
    script[size] = 0;
    if (!read_assignments((size_t)size))
        return 0;
    return *metadir == '/' && length(metadir) <= LONGEST && is_plain_path(workdir) &&
           length(boot) + length(pid_namespace) + length(host) < 1024 && (!*in || same(in, "/dev/null")) &&
           *words[0] && *words[0] != '-' && !has(words[0], '=') && is_plain_output(out) &&
           (!*out || is_plain_output(err)) && set_environment(environment);
}

/* --- records --------------------------------------------------------------------------------------------------- */

static int place = AT_FDCWD; /* the metadir itself, which no move of the spool changes; else its path has to do */
static char record_path[LONGEST + 64], *record_name;
static char message[2 * MOST], *const said = message + 7; /* "spool: " and the line that is a record as well */

static const char *record(const char *name)
{
    add(record_name, name);
    return record_path;
}

static int exists(const char *name) { return k_access_in(place, record(name), F_OK) == 0; }

/* Opening a FIFO could block forever, and a link leads elsewhere. */
static int in_the_way(const char *name)
{
    struct stat found;
    return k_stat_in(place, record(name), AT_SYMLINK_NOFOLLOW, &found) == 0 && !S_ISREG(found.st_mode);
}

/* Whether a link stands for the directory of this run, or of its job: what lies there is another's. Nothing stands for a
   directory that is held. */
static int astray(void)
{
    static char job[LONGEST + 64];
    struct stat found;
    if (place != AT_FDCWD)
        return 0;
    if (!*job) {
        char *end = add(job, metadir);
        while (end > job && *--end != '/')
            ;
        *end = 0;
    }
    return (k_stat(metadir, AT_SYMLINK_NOFOLLOW, &found) == 0 && S_ISLNK(found.st_mode)) ||
           (k_stat(job, AT_SYMLINK_NOFOLLOW, &found) == 0 && S_ISLNK(found.st_mode));
}

static int is_directory(const char *path)
{
    struct stat found;
    return k_stat(path, 0, &found) == 0 && S_ISDIR(found.st_mode);
}

/* Whether the metadir was removed. One that is held is still there for this process, but empty, and for good. */
static int gone(void)
{
    return place == AT_FDCWD ? !is_directory(metadir) : !exists("jid") && !exists("run.sh");
}

/* Hold the metadir, so that it is found wherever it is moved to. */
static void open_records(void)
{
    record_name = add(add(record_path, metadir), "/");
    const long fd = k_open(metadir, O_RDONLY | O_DIRECTORY);
    if (fd < 0)
        return;
    const int held = (fd == HELD || k_dup_own(fd, HELD) == HELD) && !astray();
    if (fd != HELD)
        k_close(fd);
    if (held) {
        place = HELD;
        record_name = record_path;
    }
}

/* Write a record, and return whether it is there. */
static int put(const char *name, const char *text)
{
    if (astray())
        return 0;
    long fd = k_open_in(place, record(name), O_WRONLY | O_CREAT | O_EXCL);
    if (fd == -EEXIST) {
        if (in_the_way(name))
            return 0;
        fd = k_open_in(place, record(name), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_NONBLOCK);
    }
    if (fd < 0)
        return 0;
    const int whole = write_all(fd, text, length(text));
    return k_close(fd) == 0 && whole; /* a file system of another machine may say only now that it has no room */
}

/* Put together why the command is not run. */
static void because(const char *what, const char *which, const char *colon, const char *why)
{
    add(add(add(add(add(said, what), which), colon), why), "\n");
}

/* Record that, and write it to *log*, unless the run was stopped. */
static void fail(long log)
{
    if (!exists("stop") && !exists("signal"))
        write_all(log, message, length(message));
    put("error", said);
}

/* --- becoming a program ---------------------------------------------------------------------------------------- */

static int is_missing(long error)
{
    return error == -ENOENT || error == -ENOTDIR || error == -ESTALE || error == -ENODEV || error == -ETIMEDOUT;
}

/* Become the program at *path*; a text without `#!` is the shell's. *called* has room for one more word before it. */
static long try(const char *path, char **called, char **environment)
{
    long error = k_execve(path, called, environment);
    if (error == -ENOEXEC) {
        char *const name = called[0], *const before = called[-1];
        called[-1] = (char *)SHELL;
        called[0] = (char *)path;
        error = k_execve(SHELL, called - 1, environment);
        called[-1] = before;
        called[0] = name;
    }
    return error;
}

/* Go through the places of PATH; put each path of *name* in turn at *path*, and return the next place, NULL at the end. */
static const char *next_place(const char *places, const char *name, char path[2 * LONGEST + 2])
{
    size_t n = 0;
    while (places[n] && places[n] != ':')
        n++;
    *path = 0;
    if (n <= LONGEST && length(name) <= LONGEST) {
        for (size_t i = 0; i < n; i++)
            path[i] = places[i];
        path[n] = '/';
        add(path + n + (n != 0), name);
    }
    return places[n] ? places + n + 1 : NULL;
}

/* Become the program *called*, which is looked for as execvp(3) does; return why not. */
static long execute(char **called, char **environment)
{
    char path[2 * LONGEST + 2];
    const char *places = value_of(environment, "PATH=");
    int forbidden = 0;
    if (has(called[0], '/'))
        return try(called[0], called, environment);
    for (places = places ? places : DEFAULT_PATH; places;) {
        places = next_place(places, called[0], path);
        long error = *path ? try(path, called, environment) : -ENOENT;
        if (error == -EACCES)
            forbidden = 1;
        else if (!is_missing(error))
            return error;
    }
    return forbidden ? -EACCES : -ENOENT;
}

/* Whether *path* can be executed; *why* and *code* stay as they are where there is nothing of that name. */
static int can_execute(const char *path, const char **why, int *code)
{
    struct stat found;
    if (!*path || k_stat(path, 0, &found) < 0)
        return 0;
    *code = NO_PERMISSION;
    if (S_ISDIR(found.st_mode))
        *why = "it is a directory";
    else if (k_access(path, X_OK) == 0)
        return 1;
    else
        *why = "it may not be executed";
    return 0;
}

/* Say why the program *name* cannot be found, and return the exit code for that; 0: it can. */
static int not_found(const char *name, const char *path_variable, char *to)
{
    char path[2 * LONGEST + 2];
    int code = NOT_FOUND, found = 0;
    const char *why = "no such file", *places = path_variable ? path_variable : DEFAULT_PATH;
    add(to, "");
    if (has(name, '/'))
        found = can_execute(name, &why, &code);
    else {
        why = NULL;
        while (places && !found) {
            places = next_place(places, name, path);
            found = can_execute(path, &why, &code);
        }
    }
    if (found)
        return 0;
    if (why)
        add(to, why);
    else
        add(add(to, "not found in PATH "), path_variable ? path_variable : "");
    return code;
}

/* Say why a program that is there cannot be executed, and return the exit code for that. */
static int not_executed(long error, char *to)
{
    if (error == -ENOENT)
        add(to, "its interpreter or its loader does not exist");
    else if (error == -EACCES)
        add(to, "it or its interpreter may not be executed");
    else if (error == -E2BIG)
        add(to, "its arguments and its environment are too long");
    else if (error == -ETXTBSY)
        add(to, "it is being written");
    else
        add_number(add(to, "the kernel refuses it with error "), (unsigned long)-error);
    return error == -ENOENT ? NOT_FOUND : NO_PERMISSION;
}

/* --- the run --------------------------------------------------------------------------------------------------- */

static const Signals heard = {BIT(SIGHUP) | BIT(SIGINT) | BIT(SIGQUIT) | BIT(SIGUSR1) | BIT(SIGUSR2) | BIT(SIGTERM) |
                              BIT(SIGCHLD)};
static Signals blocked_before;
static int served;   /* by a server: the null device is open as 0, and nothing else is but 1 and 2 */
static long child;   /* the command, while it runs */
static int has_run;  /* it was started */
static int has_left; /* it has ended, and left other children */
static struct rusage used; /* by the command, and by what it has waited for */
static int ended;    /* the exit code of a run that was sent one of the first four */
static char line[2048];

/* Pass a signal on. */
static void pass_on(long number)
{
    const char *name = number == SIGHUP ? "HUP\n" : number == SIGINT ? "INT\n" : number == SIGQUIT ? "QUIT\n" : "TERM\n";
    if (number != SIGUSR1 && number != SIGUSR2) {
        ended = 128 + (int)number;
        put("signal", name);
    }
    if (child)
        k_kill(child, (int)number);
}

/* Hear what has been sent so far, or within *seconds* if that is nothing. */
static void hear(long seconds)
{
    long number;
    while ((number = k_sigwait(heard, seconds)) > 0) {
        if (number != SIGCHLD)
            pass_on(number);
        seconds = 0;
    }
}

/* Read one line of a file of /proc into *to*; NULL: it cannot be read. */
static char *read_line(const char *path, char *to, size_t room)
{
    long fd = k_open(path, O_RDONLY);
    long got = fd < 0 ? fd : k_read(fd, to, room - 1);
    if (fd >= 0)
        k_close(fd);
    while (got > 0 && to[got - 1] != '\n')
        got--;
    if (got <= 0)
        return NULL;
    to[got - 1] = 0;
    return to;
}

/* Append "PID START_TICKS" of this process, from /proc, where a pid is what the script's `$$` is. */
static char *add_identity(char *end)
{
    char text[2048], *field = read_line("/proc/self/stat", text, sizeof text), *last = NULL;
    for (char *c = field; c && *c; c++)
        if (*c == ')')
            last = c;
    if (!last)
        return NULL;
    /* The second field is the program's name and may hold anything, so count from its end. */
    for (int i = 0; i < 20; i++) {
        while (*last && *last != ' ')
            last++;
        if (!*last++)
            return NULL;
    }
    for (; *field >= '0' && *field <= '9'; field++)
        *end++ = *field;
    *end++ = ' ';
    for (; *last >= '0' && *last <= '9'; last++)
        *end++ = *last;
    *end = 0;
    return end;
}

/* Create the jid, or leave. */
static void take_jid(void)
{
    char boot_now[64], *end = add_identity(line);
    if (!end || (!served && !(boot = read_line("/proc/sys/kernel/random/boot_id", boot_now, sizeof boot_now))))
        k_exit(NO_JID);
    add(add(add(add(add(add(add(end, " "), boot), " "), pid_namespace), " "), host), "\n");
    if (own_mask >= 0)
        k_umask((int)k_umask(022) | 022);
    long fd = k_open_in(place, record("jid"), O_WRONLY | O_CREAT | O_EXCL);
    if (fd < 0)
        k_exit(exists("jid") ? ALREADY_STARTED : NO_JID);
    const int whole = write_all(fd, line, length(line));
    if (k_close(fd) < 0 || !whole) {
        k_unlink_in(place, record("jid"));
        k_exit(NO_JID);
    }
}

static void enter_limits(void)
{
    struct rlimit found;
    if (*cgroup) { /* if this fails, memory is watched by polling */
        long fd = k_open(cgroup, O_WRONLY | O_CREAT | O_TRUNC);
        char *end = line; /* which begins with our pid */
        while (*end != ' ')
            end++;
        add(end, "\n");
        write_all(fd, line, length(line));
        k_close(fd);
    }
    if (files && k_limits(RLIMIT_NOFILE, &found, NULL) == 0 && found.rlim_cur != (rlim_t)files) {
        found.rlim_cur = (rlim_t)files;
        k_limits(RLIMIT_NOFILE, NULL, &found);
    }
}

/* Set what *limits* says; one above the hard limit stays as it is. */
static void limit_command(void)
{
    static const struct {
        char letter;
        int which;
        rlim_t unit;
    } known[] = {{'c', RLIMIT_CORE, 512}, {'d', RLIMIT_DATA, 1024}, {'f', RLIMIT_FSIZE, 512}, {'n', RLIMIT_NOFILE, 1},
        {'s', RLIMIT_STACK, 1024}, {'t', RLIMIT_CPU, 1}, {'v', RLIMIT_AS, 1024}};
    for (const char *c = limits; *c; c += *c == ' ') {
        const char letter = *c;
        rlim_t number = 0;
        struct rlimit found;
        for (c += 2; *c && *c != ' '; c++)
            number = *c >= '0' && *c <= '9' ? number * 10 + (rlim_t)(*c - '0') : RLIM_INFINITY;
        for (size_t i = 0; i < sizeof known / sizeof *known; i++)
            if (known[i].letter == letter && k_limits(known[i].which, &found, NULL) == 0) {
                found.rlim_cur = number == RLIM_INFINITY ? number : number * known[i].unit;
                k_limits(known[i].which, NULL, &found);
            }
    }
}

/* Make the directory that a file lies in, as `mkdir -p` does, where there is none. */
static void make_parent(const char *path)
{
    char directory[LONGEST + 1], *last = directory;
    add(directory, path);
    for (char *c = directory; *c; c++)
        if (*c == '/')
            last = c;
    *last = 0;
    if (is_directory(directory))
        return;
    const long mask = k_umask(0);
    k_umask((int)mask & ~0300);
    for (char *c = directory; *directory && *++c;)
        if (*c == '/') {
            *c = 0;
            k_mkdir(directory);
            *c = '/';
        }
    k_umask((int)mask);
    if (*directory)
        k_mkdir(directory);
}

static long open_output(const char *path)
{
    long fd = k_open(path, O_WRONLY | O_CREAT | O_APPEND);
    if (fd == -ENOENT || fd == -EISDIR) { /* which a path that ends with a slash is always */
        make_parent(path);
        fd = k_open(path, O_WRONLY | O_CREAT | O_APPEND);
    }
    return fd;
}

static int is_in_metadir(const char *path)
{
    const char *rest = after(path, metadir);
    return rest && *rest == '/';
}

static long files_of_command[3] = {0, 1, 2};

/* Open what the command reads and writes. */
static int open_files(void)
{
    long *const f = files_of_command;
    if (*in && !served && (f[0] = k_open(in, O_RDONLY)) < 0)
        return 0;
    if (!*out)
        return 1;
    const int own = own_mask >= 0 && !is_in_metadir(out) && !is_in_metadir(err);
    if (own)
        k_umask(own_mask);
    if (*err) { /* both directories come first: the one of the second may be named as the first file is */
        make_parent(out);
        make_parent(err);
    }
    if ((f[1] = open_output(out)) >= 0)
        f[2] = *err ? open_output(err) : f[1];
    if (own)
        k_umask(own_mask | 022);
    return f[1] >= 0 && f[2] >= 0;
}

/* If *path* may be what could not be opened, say why and be true. */
static int not_opened(const char *path, const char *name)
{
    char directory[LONGEST + 1], *last = directory;
    if (!*path)
        return 0;
    add(directory, path);
    for (char *c = directory; *c; c++)
        if (*c == '/')
            last = c;
    *last = 0;
    const char *why = is_directory(path)         ? "it is a directory"
                      : !is_directory(directory) ? "its directory is not there and cannot be made"
                      : k_access(path, F_OK) < 0 ? "it cannot be created"
                      : k_access(path, W_OK) < 0 ? "it may not be written"
                                                 : NULL;
    if (why)
        because(name, path, ": ", why);
    return why != NULL;
}

/* The last step of a child: turn into the command. What it writes, it writes into our memory; so it has a stack frame of
   its own. */
static __attribute__((noinline)) _Noreturn void become_command(void)
{
    if (own_mask >= 0)
        k_umask(own_mask);
    limit_command();
    if (nicer)
        k_nicer((int)nicer);
    for (int i = 0; i < 3; i++)
        if (files_of_command[i] != i)
            k_dup(files_of_command[i], i);
    for (int fd = 3; fd < HELD && !served; fd++)
        k_close(fd); /* as the script does with what it was given; what is held closes itself */
    k_mask(SIG_SETMASK, blocked_before);
    const long error = execute(words, variables);
    if (own_mask >= 0)
        k_umask(own_mask | 022); /* of records */
    static char why[2 * MOST];
    int code = not_found(words[0], value_of(variables, "PATH="), why);
    if (code) {
        because("cannot run the command: ", words[0], ": ", why);
        fail(2);
    } else if (error == -EAGAIN || error == -ENOMEM || error == -EMFILE || error == -ENFILE) {
        because("cannot start the command: the machine cannot execute ", words[0], "", "");
        put("refused", said);
        code = REFUSED;
    } else {
        code = not_executed(error, why);
        because("cannot run ", words[0], ": ", why);
        say(message);
    }
    k_exit(code);
}

/* Leave without an exit code: nothing of the command has begun. */
static _Noreturn void go_back(void)
{
    put("status", "queued\n");
    k_exit(REFUSED);
}

/* Reap what has ended, which may be what the command has abandoned; return whether the command itself has. */
static int waited_for(int *status)
{
    struct rusage its;
    int its_status, found = 0;
    long pid;
    while ((pid = k_wait(&its_status, WNOHANG, &its)) > 0)
        if (pid == child) {
            *status = its_status, used = its;
            found = 1;
        }
    has_left = pid == 0;
    return found;
}

/* Wait for the last child: what the command has abandoned is one, since this process is the child subreaper. */
static void outlast(void)
{
    long pid;
    while ((pid = k_wait(NULL, 0, NULL)) > 0 || pid == -EINTR)
        ;
}

/* Run the command and wait for it; return its exit code. */
static int run_command(void)
{
    int status = 0;
    if (ended)
        return ended;
    has_run = 1; /* a shell starts its child first, and that finds the records */
    if (exists("stop") || exists("signal"))
        return 128 + SIGTERM; /* the run was stopped before this process could hear of it */
    put("status", "running\n"); /* before the command can tamper with its records */
    const long pid = K_VFORK();
    if (pid == 0)
        become_command();
    if (pid < 0) {
        put("refused", "cannot start the command: the machine refuses another process\n");
        go_back();
    }
    child = pid;
    while (!waited_for(&status)) {
        const long number = k_sigwait(heard, -1);
        if (number > 0 && number != SIGCHLD)
            pass_on(number);
    }
    child = 0;
    const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    if (code == REFUSED && exists("refused"))
        go_back();
    return code;
}

/* Append "KEY = NUMBER", where a file of our own control group has one, behind *head*. */
static char *add_count(char *end, const char *key, const char *file, const char *head, unsigned long unit)
{
    static char path[LONGEST + 64], text[1024];
    char *last = path;
    add(path, cgroup);
    for (char *c = path; *c; c++)
        if (*c == '/')
            last = c + 1;
    add(last, file);
    const char *digits = read_line(path, text, sizeof text);
    unsigned long value = 0;
    if (!digits || !(digits = after(digits, head)) || *digits < '0' || *digits > '9')
        return end;
    for (; *digits >= '0' && *digits <= '9'; digits++)
        value = value * 10 + (unsigned long)(*digits - '0');
    return add(add_number(add(add(end, key), " = "), value * unit), "\n");
}

/* Write down what the command has used. Nothing depends on it, and it must not take the room of the exit code. */
static void put_usage(void)
{
    char *end = line;
    if (!has_run)
        return;
    *end = 0;
    if (*cgroup) {
        end = add_count(end, "cpu_time_ns", "cpu.stat", "usage_usec ", 1000);
        end = add_count(end, "peak_memory_bytes", "memory.peak", "", 1);
    }
    if (!after(line, "cpu_time_ns")) {
        const unsigned long us = (unsigned long)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1000000 +
                                 (unsigned long)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
        end = add(add_number(add(end, "cpu_time_ns = "), us * 1000), "\n");
    }
    if (used.ru_maxrss > 0)
        add(add_number(add(end, "peak_process_bytes = "), (unsigned long)used.ru_maxrss * 1024), "\n");
    put("usage", line);
}

/* Leave a note for the dispatcher, which no event tells of a record. */
static void note_leftovers(void)
{
    static char path[2 * LONGEST + 64] = "../../.notes/";
    char *run = (char *)metadir + length(metadir), *job;
    while (run > metadir && *--run != '/')
        ;
    for (job = run; job > metadir && *--job != '/';)
        ;
    if (place != HELD || job == metadir)
        return;
    char *const name = path + length(path), *const end = add(name, job + 1); /* NAME/RUN */
    name[run - job - 1] = '.';
    add(end, ".leftovers");
    k_close(k_open_in(place, path, O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK));
}

/* The last records, and the end. */
static _Noreturn void finish(int code)
{
    static char aside[LONGEST + 64];
    long fd = -1;
    ended = 0; /* who sees the last status may send a signal: only what came before is over */
    if (code || in_the_way("status"))
        put("status", "failed\n");
    else if (!astray() && (fd = k_open_in(place, record("status"), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK)) >= 0) {
        write_all(fd, "finished\n", 9); /* over "running": a file that is cut to nothing is synced when it is closed */
        k_close(fd);
    }
    put_usage();
    add(add_number(line, (unsigned long)code), "\n");
    for (int tries = 1; (has_left && !put("leftovers", "running\n")) || !put("rc", line); tries++) { /* the exit code must not be lost to a disk that is full */
        if (tries == 1 && !astray()) /* it may have had the last room */
            k_unlink_in(place, record("usage"));
        if (gone() || ended || (exists("stop") && !astray()))
            break;
        hear(1);
        if (tries >= MOST_TRIES && !astray() && in_the_way("rc")) {
            char *const end = add(aside, record("rc.aside"));
            struct stat found;
            if (k_stat_in(place, aside, 0, &found) == 0 && S_ISDIR(found.st_mode))
                add(end, "/rc");
            k_rename_in(place, record("rc"), aside);
        }
    }
    if (has_left) {
        note_leftovers();
        outlast();
        if (!astray())
            k_unlink_in(place, record("leftovers"));
    }
    k_exit(code);
}

/* Do what the script says. */
static _Noreturn void wrap(void)
{
    blocked_before = k_mask(SIG_BLOCK, heard);
    open_records();
    take_jid();
    enter_limits();
    const int opened = open_files();
    const int entered = opened && k_chdir(workdir) == 0;
    hear(0);
    if (entered)
        finish(run_command());
    if (opened)
        because("cannot enter the workdir: ", workdir, ": ",
                k_access(workdir, F_OK) < 0 ? "no such directory"
                : !is_directory(workdir)    ? "it is not a directory"
                                            : "it may not be entered");
    else if (!not_opened(out, "cannot open stdout: ") && !not_opened(err, "cannot open stderr: "))
        because("cannot open stdin, stdout or stderr: is the disk full?", "", "", "");
    fail(opened ? files_of_command[2] : 2);
    finish(FAILED);
}

/* --- ways to be started ---------------------------------------------------------------------------------------- */

/* Be the shell that runs the script: a child of the server, which is told who it is, so that it need not look. */
static _Noreturn void become_shell_told(char *path, char **environment)
{
    char *called[] = {(char *)SHELL, path, NULL, NULL};
    char *const end = add_identity(line);
    int ends[2];
    if (end && k_pipe(ends) == 0) {
        add(end, "\n");
        write_all(ends[1], line, length(line));
        k_dup(ends[0], 0);
        called[2] = (char *)"told";
    }
    k_execve(SHELL, called, environment);
    k_exit(NO_JID);
}

/* Room among what the kernel shows as the arguments or the environment of this process. */
typedef struct {
    char *at, *end;
} Room;

static Room room_of(char *text)
{
    const Room room = {text, text ? text + length(text) : NULL};
    for (char *c = room.at; c < room.end; c++)
        *c = 0;
    return room;
}

static void show(Room *room, const char *text)
{
    if (length(text) < (size_t)(room->end - room->at))
        room->at = add(room->at, text) + 1;
}

/* A request is the path of a script and the environment of its wrapper, each ended by a NUL byte. The answer is the
   pid of the wrapper, or -errno, as an int. The end of the file is that of who asks, and of this process. A wrapper is
   seen for that of its run by its script among the *arguments*, and by the marks among the *marks*. */
static _Noreturn void serve(long fd, Room arguments, Room marks)
{
    static char request[MOST + 1], *environment[MOST / 2 + 1];
    served = 1;
    for (int other = 3; other <= HELD; other++)
        if (other != fd)
            k_close(other); /* once for all runs, each of whose scripts does it */
    for (;;) {
        const long size = k_receive(fd, request, MOST);
        if (size == -EINTR)
            continue;
        if (size <= 0)
            k_exit(0);
        int answer = -EMSGSIZE;
        if (size <= MOST && !request[size - 1]) {
            answer = (int)k_sibling();
            if (answer == 0) {
                size_t n = 0;
                k_close(fd);
                k_setsid();
                k_become_subreaper(); /* also of what it may turn into */
                show(&arguments, request);
                for (char *text = request + length(request) + 1; text < request + size; text += length(text) + 1) {
                    environment[n++] = text;
                    if (after(text, "SPOOL_"))
                        show(&marks, text);
                }
                environment[n] = NULL;
                if (understand(request, environment))
                    wrap();
                become_shell_told(request, environment);
            }
        }
        if (k_send(fd, &answer, sizeof answer) < 0)
            k_exit(0);
    }
}

/* Whether this process was started as any program is; else only a shell knows what to make of it. */
static int is_started_as_usual(void)
{
    static const int each[] = {SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGTERM, SIGCHLD};
    for (size_t i = 0; i < sizeof each / sizeof *each; i++)
        if (k_ignored(each[i]))
            return 0;
    for (int fd = 0; fd < 3; fd++)
        if (k_flags(fd) < 0)
            return 0;
    const Signals none = {0};
    return !(k_mask(SIG_BLOCK, none).bits & heard.bits);
}

static _Noreturn void run(int n, char **given, char **environment)
{
    k_become_subreaper();
    if (n == 3 && is_started_as_usual() && understand(given[2], environment))
        wrap();
    given[1] = (char *)SHELL;
    k_execve(SHELL, given + 1, environment);
    say("spool: cannot run " SHELL "\n");
    k_exit(NOT_FOUND);
}

/* Undo what a shell did to signals, set the variables, and become the program. */
static _Noreturn void become(int n, char **given, char **environment)
{
    int i = 1;
    for (; i < n && *given[i] == '-'; i++) {
        if (same(given[i], "--default-signal=INT,QUIT")) {
            k_default(SIGINT);
            k_default(SIGQUIT);
        } else if (same(given[i], "-u") && i + 1 < n) {
            const size_t size = length(given[++i]);
            char **to = environment;
            for (char **from = environment; *from; from++)
                if (!same_bytes(*from, given[i], size) || (*from)[size] != '=')
                    *to++ = *from;
            *to = NULL;
        } else if (same(given[i], "--")) {
            i++;
            break;
        } else
            i = n;
    }
    size_t count = 0;
    while (environment[count])
        count++;
    char *all[count + (size_t)n + 1];
    for (size_t j = 0; j <= count; j++)
        all[j] = environment[j];
    for (; i < n && has(given[i], '='); i++) {
        size_t size = 0, j = 0;
        while (given[i][size] != '=')
            size++;
        while (j < count && !same_bytes(all[j], given[i], size + 1))
            j++;
        all[j] = given[i];
        if (j == count)
            all[++count] = NULL;
    }
    if (i >= n) {
        say("usage: spool-wrapper [--default-signal=INT,QUIT] [-u NAME] -- [NAME=VALUE...] PROGRAM [ARGUMENT...]\n");
        k_exit(FAILED);
    }
    const long error = execute(given + i, all);
    static char why[2 * MOST];
    int code = not_found(given[i], value_of(all, "PATH="), why);
    code = code ? code : not_executed(error, why);
    because("cannot run ", given[i], ": ", why);
    say(message);
    k_exit(code);
}

static _Noreturn void start(int n, char **given, char **environment)
{
    add(message, "spool: ");
    if (n >= 3 && same(given[1], "run"))
        run(n, given, environment);
    if (n == 5 && same(given[1], "reap")) {
        outlast();
        k_unlink_in(AT_FDCWD, given[3]);
        k_exit((int)number_in(given[4], 10));
    }
    if (n >= 3 && same(given[1], "serve") && number_in(given[2], 10) >= 0)
        serve(number_in(given[2], 10), room_of(given[3]), room_of(environment[0]));
    if (n == 2 && same(given[1], "--version")) {
        static const char version[] = "spool-wrapper " SPOOL_SOURCE "\n";
        k_exit(write_all(1, version, sizeof version - 1) ? 0 : 1);
    }
    become(n, given, environment);
}

#ifdef WITH_LIBC
int main(int n, char **given, char **environment) { start(n, given, environment); }
#else
__attribute__((used)) _Noreturn void begin(long *stack)
{
    const int n = (int)stack[0];
    char **given = (char **)(stack + 1);
    start(n, given, given + n + 1);
}
#endif
