/* The least that a compiled wrapper does: floor FD, a server for the jobs of spoolbench/floor.py.

   Each datagram on FD is one run: METADIR, the number of arguments, the arguments and the environment, each ended by a
   NUL. The server clones itself for it. The clone is a child of the server's own parent, which waits for it, and becomes
   the wrapper: it creates `jid`, opens the log, runs the command, and writes `status` and `rc`. The answer is its pid.
   Signals, errors and everything else that a wrapper is for are left out. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 1 << 17, WORDS = 4096 };
static char text[MOST + 2], *words[WORDS];

static void record(const char *name, int flags, const char *line)
{
    int file = open(name, O_WRONLY | O_CREAT | O_CLOEXEC | flags, 0600);
    if (file < 0 || write(file, line, strlen(line)) < 0)
        _exit(73);
    close(file);
}

static void wrapper(void)
{
    char line[64];
    int status, count = atoi(words[1]);
    char **arguments = words + 2, **environment = arguments + count + 1;

    setsid();
    if (chdir(words[0]))
        _exit(73);
    snprintf(line, sizeof line, "%ld 0 boot namespace host\n", (long)getpid());
    record("jid", O_EXCL, line);
    int log = open("log", O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    pid_t child = vfork();
    if (child == 0) {
        dup2(log, 1);
        dup2(log, 2);
        if (chdir("/") == 0)
            execve(arguments[0], arguments, environment);
        _exit(127);
    }
    record("status", O_TRUNC, "running\n");
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    record("status", 0, "finished\n"); /* over the other: cutting a file to nothing costs a write to the disk */
    snprintf(line, sizeof line, "%d\n", WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    record("rc", O_TRUNC, line);
    _exit(0);
}

int main(int count, char **given)
{
    int server = count > 1 ? atoi(given[1]) : -1;
    ssize_t size;

    fcntl(server, F_SETFD, FD_CLOEXEC);
    while ((size = recv(server, text, MOST, 0)) > 0) {
        int at = 0;
        for (char *word = text; word < text + size && at < WORDS - 2; word += strlen(word) + 1) {
            words[at++] = word;
            if (at == 2 + atoi(at > 1 ? words[1] : "0"))
                words[at++] = NULL; /* the arguments end here */
        }
        words[at] = NULL;
        pid_t pid = syscall(SYS_clone, (unsigned long)(CLONE_PARENT | SIGCHLD), 0, 0, 0, 0);
        if (pid == 0)
            wrapper();
        if (send(server, &pid, sizeof pid, 0) < 0)
            break;
    }
    return 0;
}
