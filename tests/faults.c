/* A preloaded shim that fails a process's k-th file call, or kills the process before that call, so that tests can try every call.
 *
 * Unarmed, it only forwards calls. `faults_arm(k, error, last)` starts counting: calls k to `last` fail with `error`. If `error` is 0,
 * SIGKILL ends the process before call k instead. `faults_disarm()` stops counting and returns the count. test_faults.py builds the shim,
 * and fault_runner.py drives it.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static atomic_long calls, first, last;
static atomic_int armed, error_number;

void faults_arm(long k, int error, long end) {
    atomic_store(&calls, 0), atomic_store(&first, k), atomic_store(&last, end), atomic_store(&error_number, error);
    atomic_store(&armed, 1);
}

long faults_disarm(void) {
    atomic_store(&armed, 0);
    return atomic_load(&calls);
}

/* Count a call, and return whether it must fail. */
static int fails(void) {
    if (!atomic_load(&armed)) return 0;
    long number = atomic_fetch_add(&calls, 1) + 1;
    if (number < atomic_load(&first) || number > atomic_load(&last)) return 0;
    if (atomic_load(&error_number) == 0) kill(getpid(), SIGKILL);
    errno = atomic_load(&error_number);
    return 1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define PASS(type, failed, name, parameters, ...) \
    type name parameters {                        \
        if (fails()) return failed;               \
        return NEXT(name)(__VA_ARGS__);           \
    }

static mode_t mode_of(int flags, va_list rest) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; }

#define OPEN(name)                                \
    int name(const char *path, int flags, ...) {  \
        va_list rest;                             \
        va_start(rest, flags);                    \
        mode_t mode = mode_of(flags, rest);       \
        va_end(rest);                             \
        if (fails()) return -1;                   \
        return NEXT(name)(path, flags, mode);     \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                         \
    int name(int folder, const char *path, int flags, ...) { \
        va_list rest;                                        \
        va_start(rest, flags);                               \
        mode_t mode = mode_of(flags, rest);                  \
        va_end(rest);                                        \
        if (fails()) return -1;                              \
        return NEXT(name)(folder, path, flags, mode);        \
    }
OPENAT(openat)
OPENAT(openat64)

PASS(ssize_t, -1, read, (int file, void *to, size_t count), file, to, count)
PASS(ssize_t, -1, pread64, (int file, void *to, size_t count, off64_t at), file, to, count, at)
PASS(ssize_t, -1, write, (int file, const void *from, size_t count), file, from, count)
PASS(int, -1, fsync, (int file), file)
PASS(int, -1, fdatasync, (int file), file)
PASS(int, -1, link, (const char *from, const char *to), from, to)
PASS(int, -1, linkat, (int a, const char *from, int b, const char *to, int flags), a, from, b, to, flags)
PASS(int, -1, rename, (const char *from, const char *to), from, to)
PASS(int, -1, renameat2, (int a, const char *from, int b, const char *to, unsigned flags), a, from, b, to, flags)
PASS(int, -1, unlink, (const char *path), path)
PASS(int, -1, unlinkat, (int folder, const char *path, int flags), folder, path, flags)
PASS(int, -1, mkdir, (const char *path, mode_t mode), path, mode)
PASS(int, -1, rmdir, (const char *path), path)
PASS(DIR *, NULL, opendir, (const char *path), path)
PASS(int, -1, statx, (int folder, const char *restrict path, int flags, unsigned mask, struct statx *restrict to), folder, path, flags, mask, to)
PASS(void *, MAP_FAILED, mmap64, (void *at, size_t count, int rights, int flags, int file, off64_t from), at, count, rights, flags, file, from)

/* An mmap of anonymous memory is not a file call. */
void *mmap(void *at, size_t count, int rights, int flags, int file, off_t from) {
    if (file >= 0 && fails()) return MAP_FAILED;
    return NEXT(mmap)(at, count, rights, flags, file, from);
}
