/* A librocm_smi64.so whose GPUs are lines of a text file, read anew at every call.
 *
 * FAKE_ROCM_STATE names the file. One fact a line, words parted by blanks, the name last:
 *
 *   gpu ID BUS TOTAL USED BUSY ENERGY NAME...  a GPU; ID as in 0x1a2b, 0 if it tells none; BUS a number;
 *                                              sizes in bytes, BUSY in percent, ENERGY in steps of 15.3 uJ
 *   process PID AT BYTES                       a process on GPU number AT
 *   error CALL CODE [AT]                       that call returns CODE (for that GPU)
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint32_t pid, pasid;
    uint64_t vram, sdma;
    uint32_t occupancy;
} Process;
typedef struct {
    unsigned long long id, bus, total, used, busy, energy;
    char name[96];
} Gpu;

static FILE *state(void) {
    const char *path = getenv("FAKE_ROCM_STATE");
    return path ? fopen(path, "r") : NULL;
}

static int wanted(const char *call, long at) {
    char line[256], name[128];
    int code, found = 0;
    long whose;
    FILE *file = state();
    if (!file) return 8;
    while (fgets(line, sizeof line, file)) {
        whose = -1;
        if (sscanf(line, "error %127s %d %ld", name, &code, &whose) >= 2 && !strcmp(name, call) && (whose < 0 || whose == at))
            found = code;
    }
    fclose(file);
    return found;
}

static int gpu(const char *call, uint32_t at, Gpu *to) {
    char line[256];
    int code = wanted(call, at), end = 0;
    uint32_t n = 0;
    FILE *file;
    if (code) return code;
    file = state();
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "gpu %llx %llu %llu %llu %llu %llu %n", &to->id, &to->bus, &to->total, &to->used, &to->busy,
                   &to->energy, &end) == 6 && n++ == at) {
            snprintf(to->name, sizeof to->name, "%.*s", (int)strcspn(line + end, "\n"), line + end);
            fclose(file);
            return 0;
        }
    fclose(file);
    return 1;
}

int rsmi_init(uint64_t flags) {
    (void)flags;
    return wanted("rsmi_init", -1);
}

int rsmi_status_string(int status, const char **to) {
    static char text[64];
    snprintf(text, sizeof text, "RSMI_STATUS number %d", status);
    *to = text;
    return 0;
}

int rsmi_num_monitor_devices(uint32_t *to) {
    char line[256];
    FILE *file = state();
    int code = wanted("rsmi_num_monitor_devices", -1);
    *to = 0;
    while (file && fgets(line, sizeof line, file)) *to += !strncmp(line, "gpu ", 4);
    if (file) fclose(file);
    return code;
}

#define NUMBER(NAME, FIELD) \
    int NAME(uint32_t at, uint64_t *to) { \
        Gpu found; \
        int code = gpu(#NAME, at, &found); \
        if (!code) *to = found.FIELD; \
        return code; \
    }
NUMBER(rsmi_dev_unique_id_get, id)

int rsmi_dev_pci_id_get(uint32_t at, uint64_t *to) {
    Gpu found;
    int code = gpu("rsmi_dev_pci_id_get", at, &found);
    if (!code) *to = found.bus << 8;
    return code;
}

int rsmi_dev_memory_total_get(uint32_t at, int kind, uint64_t *to) {
    Gpu found;
    int code = gpu("rsmi_dev_memory_total_get", at, &found);
    if (!code) *to = found.total;
    return kind ? 1 : code;
}

int rsmi_dev_memory_usage_get(uint32_t at, int kind, uint64_t *to) {
    Gpu found;
    int code = gpu("rsmi_dev_memory_usage_get", at, &found);
    if (!code) *to = found.used;
    return kind ? 1 : code;
}

int rsmi_dev_busy_percent_get(uint32_t at, uint32_t *to) {
    Gpu found;
    int code = gpu("rsmi_dev_busy_percent_get", at, &found);
    if (!code) *to = (uint32_t)found.busy;
    return code;
}

int rsmi_dev_name_get(uint32_t at, char *to, size_t size) {
    Gpu found;
    int code = gpu("rsmi_dev_name_get", at, &found);
    if (!code) snprintf(to, size, "%s", found.name);
    return code;
}

int rsmi_dev_energy_count_get(uint32_t at, uint64_t *to, float *step, uint64_t *when) {
    Gpu found;
    int code = gpu("rsmi_dev_energy_count_get", at, &found);
    if (!code) *to = found.energy, *step = 15.3f, *when = 1;
    return code;
}

static uint32_t processes(Process *to, uint32_t room, uint32_t *on, uint32_t pid, uint32_t at) {
    char line[256];
    unsigned one, where;
    unsigned long long bytes;
    uint32_t n = 0;
    FILE *file = state();
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "process %u %u %llu", &one, &where, &bytes) != 3) continue;
        if ((pid && one != pid) || (at != ~0u && where != at)) continue;
        if (to && n < room) memset(&to[n], 0, sizeof to[n]), to[n].pid = one, to[n].vram = bytes;
        if (on && n < room) on[n] = where;
        n++;
    }
    if (file) fclose(file);
    return n;
}

int rsmi_compute_process_info_get(Process *to, uint32_t *count) {
    int code = wanted("rsmi_compute_process_info_get", -1);
    *count = processes(to, *count, NULL, 0, ~0u);
    return code;
}

int rsmi_compute_process_gpus_get(uint32_t pid, uint32_t *on, uint32_t *count) {
    int code = wanted("rsmi_compute_process_gpus_get", -1);
    *count = processes(NULL, *count, on, pid, ~0u);
    return code;
}

int rsmi_compute_process_info_by_device_get(uint32_t pid, uint32_t at, Process *to) {
    int code = wanted("rsmi_compute_process_info_by_device_get", -1);
    return processes(to, 1, NULL, pid, at) ? code : 10;
}
