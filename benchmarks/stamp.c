/* The job that is measured: stamp FILE [MILLISECONDS [GATE]]

   Appends "START END PID" to FILE, in nanoseconds of the real-time clock: START is taken at the first instruction of
   main, END as the last thing before the line is written. In between it sleeps. With a GATE, a FIFO, it then waits
   until somebody has opened and closed that for writing: so a slot is held, and its line says that it is. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int main(int count, char **words)
{
    struct timespec start, end;
    char line[96];

    clock_gettime(CLOCK_REALTIME, &start);
    if (count < 2)
        return 2;
    int file = open(words[1], O_WRONLY | O_CREAT | O_APPEND, 0644);
    long ms = count > 2 ? atol(words[2]) : 0;
    if (ms > 0) {
        struct timespec rest = {ms / 1000, ms % 1000 * 1000000L};
        nanosleep(&rest, NULL);
    }
    clock_gettime(CLOCK_REALTIME, &end);
    int size = snprintf(line, sizeof line, "%ld%09ld %ld%09ld %ld\n", (long)start.tv_sec, start.tv_nsec,
                        (long)end.tv_sec, end.tv_nsec, (long)getpid());
    if (file < 0 || write(file, line, size) != size)
        return 1;
    if (count > 3) {
        int gate = open(words[3], O_RDONLY);
        while (gate >= 0 && read(gate, line, sizeof line) > 0)
            ;
    }
    return 0;
}
