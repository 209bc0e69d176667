/* A stand-in for NVIDIA's management library, which pynvml loads by name. The devices, what they answer and what
 * happens to them stand in the file that NVML_STUB names, read anew at each call:
 *
 *     gpus 2
 *     0 uncorrectable 3          what a device answers; see the functions for the names
 *     1 lost 1                   it answers nothing but "GPU is lost"
 *     1 fails 999                it answers everything with this error
 *     xid 0 79                   an event, delivered once to each event set that device 0 is registered with
 *
 * Only what elaunch uses. Types and numbers are those of nvml.h.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER = 9, TIMEOUT = 10, LOST = 15 };
enum { GPUS = 16, NONE = -1 };

typedef struct { int index; } Device;
typedef struct { int devices[GPUS]; int seen; } EventSet;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned field, scope; long long timestamp, latency; int type, result; union { unsigned u; double d; } value; } Field;
typedef struct { Device *device; unsigned long long type, data; unsigned instance, compute; } Event;

static Device devices[GPUS];

static FILE *state(void) {
    const char *path = getenv("NVML_STUB");
    return path ? fopen(path, "r") : NULL;
}

/* The number of gpus (index NONE), or what a device has under a name; the last line counts. */
static long long value(int index, const char *name, long long otherwise) {
    FILE *file = state();
    char line[256], key[64];
    int found;
    long long number;
    if (!file) return otherwise;
    while (fgets(line, sizeof line, file)) {
        if (index == NONE ? sscanf(line, "gpus %lld", &number) == 1
                          : sscanf(line, "%d %63s %lld", &found, key, &number) == 3 && found == index && !strcmp(key, name))
            otherwise = number;
    }
    fclose(file);
    return otherwise;
}

static int answers(Device *device) {
    if (value(device->index, "lost", 0)) return LOST;
    return (int)value(device->index, "fails", OK);
}

static int tell(Device *device, const char *name, long long otherwise, unsigned *into) {
    long long found;
    int result = answers(device);
    if (result) return result;
    found = value(device->index, name, otherwise);
    if (found < 0) return NOT_SUPPORTED;
    *into = (unsigned)found;
    return OK;
}

int nvmlInitWithFlags(unsigned flags) {
    int index;
    FILE *file = state();
    (void)flags;
    if (!file) return DRIVER;
    fclose(file);
    for (index = 0; index < GPUS; index++) devices[index].index = index;
    return OK;
}
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int result) {
    return result == LOST ? "GPU is lost" : result == DRIVER ? "Driver Not Loaded" : "Error of the stub";
}

int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)value(NONE, "", 0); return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    if (index >= value(NONE, "", 0)) return INVALID;
    *device = &devices[index];
    return OK;
}
int nvmlDeviceGetUUID(Device *device, char *text, unsigned length) {
    int result = answers(device);
    if (!result) snprintf(text, length, "GPU-%08d-stub", device->index);
    return result;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
    int index;
    if (sscanf(uuid, "GPU-%d-stub", &index) != 1 || index >= value(NONE, "", 0)) return NOT_FOUND;
    *device = &devices[index];
    return OK;
}
int nvmlDeviceGetPciInfo_v3(Device *device, Pci *pci) {
    memset(pci, 0, sizeof *pci);
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", 0x10 + device->index);
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *count) { (void)device; *count = 0; return OK; }

int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    int result = answers(device);
    memory->total = 80ULL << 30;
    memory->used = (unsigned long long)value(device->index, "used_mb", 1024) << 20;
    memory->free = memory->total - memory->used;
    return result;
}
int nvmlDeviceGetTotalEccErrors(Device *device, int kind, int counter, unsigned long long *count) {
    unsigned found;
    int result = tell(device, kind ? "uncorrectable" : "correctable", 0, &found);
    (void)counter;
    *count = found;
    return result;
}
int nvmlDeviceGetRemappedRows(Device *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    *corrected = *uncorrected = 0;
    if (value(device->index, "old", 0)) return answers(device) ? answers(device) : NOT_SUPPORTED;
    tell(device, "remap_failed", 0, failed);
    return tell(device, "remap_pending", 0, pending);
}
int nvmlDeviceGetRetiredPagesPendingStatus(Device *device, int *pending) { return tell(device, "pages_pending", 0, (unsigned *)pending); }
int nvmlDeviceGetFieldValues(Device *device, int count, Field *fields) {
    int index, result = answers(device);
    for (index = 0; index < count; index++) {
        unsigned found = 0;
        int known = fields[index].field == 230;
        fields[index].result = known ? tell(device, "recovery", -1, &found) : NOT_SUPPORTED;
        fields[index].value.u = found;
    }
    return result;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *reasons) {
    unsigned found;
    int result = tell(device, "throttle", 0, &found);
    *reasons = found;
    return result;
}
int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned *celsius) { (void)sensor; return tell(device, "temperature", 50, celsius); }
int nvmlDeviceGetTemperatureThreshold(Device *device, int which, unsigned *celsius) { (void)which; return tell(device, "shutdown", 95, celsius); }
int nvmlDeviceGetPowerUsage(Device *device, unsigned *milliwatts) { return tell(device, "power", 300000, milliwatts); }
int nvmlDeviceGetClockInfo(Device *device, int kind, unsigned *mhz) {
    (void)kind;
    return tell(device, "clock", 1755, mhz);
}
int nvmlDeviceGetMaxClockInfo(Device *device, int kind, unsigned *mhz) { (void)kind; return tell(device, "max_clock", 1980, mhz); }

int nvmlEventSetCreate(EventSet **set) { *set = calloc(1, sizeof **set); return OK; }
int nvmlEventSetFree(EventSet *set) { free(set); return OK; }
int nvmlDeviceRegisterEvents(Device *device, unsigned long long types, EventSet *set) {
    if (value(device->index, "no_events", 0)) return NOT_SUPPORTED;
    if (types != 8) return INVALID;
    set->devices[device->index] = 1;
    return answers(device);
}
int nvmlEventSetWait_v2(EventSet *set, Event *event, unsigned timeout_ms) {
    struct timespec pause = { 0, 5000000 };
    unsigned waited;
    for (waited = 0;; waited += 5) {
        FILE *file = state();
        char line[256];
        int index, number, count = 0;
        while (file && fgets(line, sizeof line, file)) {
            if (sscanf(line, "xid %d %d", &index, &number) != 2 || !set->devices[index] || count++ < set->seen) continue;
            set->seen++;
            event->device = &devices[index];
            event->type = 8;
            event->data = (unsigned long long)number;
            fclose(file);
            return OK;
        }
        if (file) fclose(file);
        if (waited >= timeout_ms) return TIMEOUT;
        nanosleep(&pause, NULL);
    }
}
