/* A libnvidia-ml.so.1 whose GPUs are lines of a text file, read anew at every call.
 *
 * FAKE_NVML_STATE names the file. One fact a line, words parted by blanks, the name last:
 *
 *   gpu UUID BUS TOTAL FREE NAME...        a GPU; BUS like 00000000:01:00.0; sizes in bytes
 *   mig UUID PARENT SLOT TOTAL FREE NAME... an instance of a GPU that has a `migmode` line
 *   migmode UUID                           MIG mode is on
 *   reserved UUID BYTES                    memory that the driver keeps for itself
 *   utilisation UUID PERCENT MEMORY        what it does; a GPU without the line, and an instance, tells nothing
 *   computes UUID PID PERCENT              what one process does of that; without any such line no card tells it
 *   energy UUID MILLIJOULES                what it has consumed; a GPU without the line tells nothing
 *   heat UUID CELSIUS MILLIWATTS           its temperature and power; a GPU without the line tells none
 *   process KIND UUID PID BYTES            KIND: compute, graphics, mps; BYTES "-": not available
 *   node UUID NODE                         the NUMA node of a GPU; one without the line tells none
 *   links UUID UUID NUMBER                 NVLinks between two GPUs; 0: by a switch
 *   error CALL CODE [UUID]                 that call returns CODE (for that device)
 *   hang CALL [UUID]                       that call returns when the line is gone
 *
 * As in the real library the list of GPUs is drawn up by nvmlInit; one that leaves the file afterwards is lost
 * (error 15) until the next nvmlInit. FAKE_NVML_CALLS, if set, names a file that gets the name of every call.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OK 0
#define UNINITIALIZED 1
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7
#define DRIVER_NOT_LOADED 9
#define GPU_IS_LOST 15
#define NOT_AVAILABLE (~0ULL)
#define MOST 64

typedef struct {
    char uuid[96], parent[96], bus[32], name[96];
    int slot;
    unsigned long long total, release;
} Device;
typedef struct { char uuid[96]; } Handle;
typedef struct { unsigned int pid; unsigned long long memory; unsigned int gpu, compute; } Process;
typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { unsigned int pid; unsigned long long at; unsigned int sm, memory, encoder, decoder; } ProcessSample;
typedef struct { unsigned long long total, release, used; } Memory;
typedef struct { unsigned int version; unsigned long long total, reserved, release, used; } MemoryV2;
typedef struct {
    char legacy[16];
    unsigned int domain, bus, device, id, subsystem;
    char text[32];
} Pci;

static Device devices[MOST];
static int device_count;
static Handle handles[MOST * 4];
static int handle_count;
static char listed[MOST][96];
static int listed_count, initialized;

static FILE *state(void) {
    const char *path = getenv("FAKE_NVML_STATE");
    return path ? fopen(path, "r") : NULL;
}

static void rest(char *to, const char *line, int words) {
    while (words-- > 0) {
        line += strspn(line, " ");
        line += strcspn(line, " ");
    }
    line += strspn(line, " ");
    snprintf(to, 96, "%.*s", (int)strcspn(line, "\n"), line);
}

static void read_devices(void) {
    char line[512];
    FILE *file = state();
    device_count = 0;
    while (file && fgets(line, sizeof line, file) && device_count < MOST) {
        Device *d = &devices[device_count];
        memset(d, 0, sizeof *d);
        d->slot = -1;
        if (sscanf(line, "gpu %95s %31s %llu %llu", d->uuid, d->bus, &d->total, &d->release) == 4) {
            rest(d->name, line, 5);
            device_count++;
        } else if (sscanf(line, "mig %95s %95s %d %llu %llu", d->uuid, d->parent, &d->slot, &d->total, &d->release) == 5) {
            rest(d->name, line, 6);
            device_count++;
        }
    }
    if (file) fclose(file);
}

static Device *device(const char *uuid) {
    read_devices();
    for (int i = 0; i < device_count; i++)
        if (!strcmp(devices[i].uuid, uuid)) return &devices[i];
    return NULL;
}

/* The error that the file wants of this call, after the file wants it to hang no longer. */
static int wanted(const char *call, const char *uuid) {
    const char *calls = getenv("FAKE_NVML_CALLS");
    FILE *log = calls ? fopen(calls, "a") : NULL;
    if (log) {
        fprintf(log, "%s %s\n", call, uuid);
        fclose(log);
    }
    for (;;) {
        char line[512], name[128], whose[96];
        int code = OK, value, hang = 0;
        FILE *file = state();
        if (!file) return DRIVER_NOT_LOADED;
        while (fgets(line, sizeof line, file)) {
            whose[0] = 0;
            if (sscanf(line, "error %127s %d %95s", name, &value, whose) >= 2 && !strcmp(name, call) &&
                (!whose[0] || !strcmp(whose, uuid)))
                code = value;
            whose[0] = 0;
            if (sscanf(line, "hang %127s %95s", name, whose) >= 1 && !strcmp(name, call) &&
                (!whose[0] || !strcmp(whose, uuid)))
                hang = 1;
        }
        fclose(file);
        if (!hang) return code;
        usleep(5000);
    }
}

static int on_device(const char *call, Handle *handle, Device **found) {
    int code;
    if (!initialized) return UNINITIALIZED;
    if (!handle) return INVALID_ARGUMENT;
    code = wanted(call, handle->uuid);
    if (code) return code;
    *found = device(handle->uuid);
    return *found ? OK : GPU_IS_LOST;
}

static Handle *handle_of(const char *uuid) {
    for (int i = 0; i < handle_count; i++)
        if (!strcmp(handles[i].uuid, uuid)) return &handles[i];
    strcpy(handles[handle_count].uuid, uuid);
    return &handles[handle_count++];
}

static int copy(char *to, unsigned int size, const char *from) {
    if (strlen(from) >= size) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return OK;
}

int nvmlInitWithFlags(unsigned int flags) {
    int code = wanted("nvmlInitWithFlags", "-");
    (void)flags;
    if (code) return code;
    read_devices();
    listed_count = 0;
    for (int i = 0; i < device_count; i++)
        if (devices[i].slot < 0) strcpy(listed[listed_count++], devices[i].uuid);
    initialized = 1;
    return OK;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    initialized = 0;
    return wanted("nvmlShutdown", "-");
}

const char *nvmlErrorString(int code) {
    static char text[32];
    snprintf(text, sizeof text, "error number %d", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *to, unsigned int size) {
    int code = wanted("nvmlSystemGetDriverVersion", "-");
    return code ? code : copy(to, size, "999.1");
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    int code = wanted("nvmlDeviceGetCount_v2", "-");
    if (!initialized) return UNINITIALIZED;
    *count = (unsigned int)listed_count;
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Handle **handle) {
    Device *found;
    if (!initialized) return UNINITIALIZED;
    if (index >= (unsigned int)listed_count) return INVALID_ARGUMENT;
    *handle = handle_of(listed[index]);
    return on_device("nvmlDeviceGetHandleByIndex_v2", *handle, &found);
}

int nvmlDeviceGetUUID(Handle *handle, char *to, unsigned int size) {
    Device *found;
    int code = on_device("nvmlDeviceGetUUID", handle, &found);
    return code ? code : copy(to, size, found->uuid);
}

int nvmlDeviceGetName(Handle *handle, char *to, unsigned int size) {
    Device *found;
    int code = on_device("nvmlDeviceGetName", handle, &found);
    return code ? code : copy(to, size, found->name);
}

int nvmlDeviceGetPciInfo_v3(Handle *handle, Pci *pci) {
    Device *found;
    int code = on_device("nvmlDeviceGetPciInfo_v3", handle, &found);
    if (code) return code;
    if (found->slot >= 0) return NOT_SUPPORTED;
    memset(pci, 0, sizeof *pci);
    sscanf(found->bus, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    return copy(pci->text, sizeof pci->text, found->bus);
}

static unsigned long long reserved(const char *uuid) {
    char line[512], whose[96];
    unsigned long long bytes = 0, value;
    FILE *file = state();
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "reserved %95s %llu", whose, &value) == 2 && !strcmp(whose, uuid)) bytes = value;
    if (file) fclose(file);
    return bytes;
}

int nvmlDeviceGetMemoryInfo(Handle *handle, Memory *memory) {
    Device *found;
    int code = on_device("nvmlDeviceGetMemoryInfo", handle, &found);
    if (code) return code;
    memory->total = found->total;
    memory->release = found->release;
    memory->used = found->total - found->release;
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(Handle *handle, MemoryV2 *memory) {
    Device *found;
    int code = on_device("nvmlDeviceGetMemoryInfo_v2", handle, &found);
    if (code) return code;
    if (memory->version != (sizeof *memory | 2u << 24)) return 25; /* ARGUMENT_VERSION_MISMATCH */
    memory->total = found->total;
    memory->reserved = reserved(found->uuid);
    memory->release = found->release;
    memory->used = found->total - found->release - memory->reserved;
    return OK;
}

int nvmlDeviceGetUtilizationRates(Handle *handle, Utilization *rates) {
    char line[512], whose[96];
    Utilization told;
    Device *found;
    FILE *file;
    int code = on_device("nvmlDeviceGetUtilizationRates", handle, &found);
    if (code) return code;
    code = NOT_SUPPORTED;
    file = found->slot < 0 ? state() : NULL;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "utilisation %95s %u %u", whose, &told.gpu, &told.memory) == 3 && !strcmp(whose, found->uuid)) {
            *rates = told;
            code = OK;
        }
    if (file) fclose(file);
    return code;
}

int nvmlDeviceGetTotalEnergyConsumption(Handle *handle, unsigned long long *energy) {
    char line[512], whose[96];
    unsigned long long told;
    Device *found;
    FILE *file;
    int code = on_device("nvmlDeviceGetTotalEnergyConsumption", handle, &found);
    if (code) return code;
    code = NOT_SUPPORTED;
    file = found->slot < 0 ? state() : NULL;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "energy %95s %llu", whose, &told) == 2 && !strcmp(whose, found->uuid)) {
            *energy = told;
            code = OK;
        }
    if (file) fclose(file);
    return code;
}

static int heat(const char *call, Handle *handle, unsigned int at, unsigned int *to) {
    char line[512], whose[96];
    unsigned int told[2];
    Device *found;
    FILE *file;
    int code = on_device(call, handle, &found);
    if (code) return code;
    code = NOT_SUPPORTED;
    file = found->slot < 0 ? state() : NULL;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "heat %95s %u %u", whose, &told[0], &told[1]) == 3 && !strcmp(whose, found->uuid)) {
            *to = told[at];
            code = OK;
        }
    if (file) fclose(file);
    return code;
}

int nvmlDeviceGetTemperature(Handle *handle, int sensor, unsigned int *celsius) {
    return sensor ? INVALID_ARGUMENT : heat("nvmlDeviceGetTemperature", handle, 0, celsius);
}

int nvmlDeviceGetPowerUsage(Handle *handle, unsigned int *milliwatts) {
    return heat("nvmlDeviceGetPowerUsage", handle, 1, milliwatts);
}

int nvmlDeviceGetProcessUtilization(Handle *handle, ProcessSample *to, unsigned int *count, unsigned long long since) {
    char line[512], whose[96];
    unsigned int pid, percent, n = 0, room = to ? *count : 0;
    Device *found;
    FILE *file;
    int code = on_device("nvmlDeviceGetProcessUtilization", handle, &found);
    if (code) return code;
    file = found->slot < 0 ? state() : NULL;
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "computes %95s %u %u", whose, &pid, &percent) != 3 || strcmp(whose, found->uuid)) continue;
        if (n < room) {
            memset(&to[n], 0, sizeof to[n]);
            to[n].pid = pid;
            to[n].at = since + 1 + n;
            to[n].sm = percent;
        }
        n++;
    }
    if (file) fclose(file);
    *count = n;
    if (!n) return NOT_SUPPORTED;
    return n > room ? INSUFFICIENT_SIZE : OK;
}

static int processes(const char *call, const char *kind, Handle *handle, unsigned int *count, Process *to) {
    char line[512], type[32], whose[96], bytes[32];
    unsigned int pid, n = 0, room = *count;
    Device *found;
    FILE *file;
    int code = on_device(call, handle, &found);
    if (code) return code;
    file = state();
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "process %31s %95s %u %31s", type, whose, &pid, bytes) != 4) continue;
        if (strcmp(type, kind) || strcmp(whose, handle->uuid)) continue;
        if (to && n < room) {
            to[n].pid = pid;
            to[n].memory = strcmp(bytes, "-") ? strtoull(bytes, NULL, 10) : NOT_AVAILABLE;
            to[n].gpu = to[n].compute = ~0u;
        }
        n++;
    }
    if (file) fclose(file);
    *count = n;
    return n > room ? INSUFFICIENT_SIZE : OK;
}

#define PROCESSES(NAME, KIND) \
    int NAME(Handle *handle, unsigned int *count, Process *to) { return processes(#NAME, KIND, handle, count, to); }
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, "compute")
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, "compute")
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics")
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps")

int nvmlDeviceGetMigMode(Handle *handle, unsigned int *now, unsigned int *later) {
    char line[512], whose[96];
    Device *found;
    FILE *file;
    int code = on_device("nvmlDeviceGetMigMode", handle, &found);
    if (code) return code;
    *now = *later = 0;
    file = state();
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "migmode %95s", whose) == 1 && !strcmp(whose, handle->uuid)) *now = *later = 1;
    if (file) fclose(file);
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(Handle *handle, unsigned int *count) {
    Device *found;
    int code = on_device("nvmlDeviceGetMaxMigDeviceCount", handle, &found);
    *count = 7;
    return code;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Handle *handle, unsigned int index, Handle **instance) {
    Device *found;
    int code = on_device("nvmlDeviceGetMigDeviceHandleByIndex", handle, &found);
    if (code) return code;
    for (int i = 0; i < device_count; i++)
        if (devices[i].slot == (int)index && !strcmp(devices[i].parent, handle->uuid)) {
            *instance = handle_of(devices[i].uuid);
            return OK;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Handle **handle) {
    int code = wanted("nvmlDeviceGetHandleByUUID", uuid);
    if (code) return code;
    if (!device(uuid)) return NOT_FOUND;
    *handle = handle_of(uuid);
    return OK;
}

int nvmlDeviceGetMemoryAffinity(Handle *handle, unsigned int size, unsigned long *masks, unsigned int scope) {
    char line[512], whose[96];
    unsigned int node;
    Device *found;
    FILE *file;
    int code = on_device("nvmlDeviceGetMemoryAffinity", handle, &found);
    if (code) return code;
    memset(masks, 0, size * sizeof *masks);
    code = NOT_SUPPORTED;
    file = state();
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "node %95s %u", whose, &node) == 2 && !strcmp(whose, handle->uuid) && node / 64 < size) {
            masks[node / 64] |= 1UL << node % 64;
            code = OK;
        }
    if (file) fclose(file);
    return code;
}

/* The other end of a link: 1 if there is such a link; -1 as *link* asks for the way by a switch to *other*. */
static int other_end(const char *uuid, int link, char *other) {
    char line[512], one[96], two[96];
    int number, is_there = 0;
    FILE *file = state();
    while (file && fgets(line, sizeof line, file)) {
        const char *there;
        if (sscanf(line, "links %95s %95s %d", one, two, &number) != 3) continue;
        if (strcmp(one, uuid) && strcmp(two, uuid)) continue;
        there = strcmp(one, uuid) ? one : two;
        if (link < 0) {
            is_there |= !strcmp(there, other);
        } else if (link < number) {
            strcpy(other, there);
            is_there = 1;
            break;
        } else {
            link -= number;
        }
    }
    if (file) fclose(file);
    return is_there;
}

int nvmlDeviceGetNvLinkState(Handle *handle, unsigned int link, unsigned int *active) {
    char other[96];
    Device *found;
    int code = on_device("nvmlDeviceGetNvLinkState", handle, &found);
    if (code) return code;
    *active = other_end(handle->uuid, (int)link, other);
    return *active ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle *handle, unsigned int link, Pci *pci) {
    char other[96];
    Device *found;
    int code = on_device("nvmlDeviceGetNvLinkRemotePciInfo_v2", handle, &found);
    if (code) return code;
    return other_end(handle->uuid, (int)link, other) ? nvmlDeviceGetPciInfo_v3(handle_of(other), pci) : NOT_SUPPORTED;
}

int nvmlDeviceGetP2PStatus(Handle *handle, Handle *other, int index, int *status) {
    Device *found;
    int code = on_device("nvmlDeviceGetP2PStatus", handle, &found);
    if (code) return code;
    *status = index == 2 && other_end(handle->uuid, -1, other->uuid) ? 0 : 5;
    return OK;
}
