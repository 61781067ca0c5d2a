/* A disk and a clock that misbehave, for one process and what it starts: LD_PRELOAD this.
 *
 *   VERL_SHIM_ROOT      only paths below it are touched
 *   VERL_SHIM_LOG       record what is done to them: a line "call\tpath\tother\toffset\tlength\n",
 *                       then that many bytes and a newline
 *   VERL_SHIM_CONTROL   a file of three 64-bit numbers, read at each call and changed by a test:
 *                       nanoseconds the clock is off, microseconds a write or sync takes longer,
 *                       1 while the disk is full
 *   VERL_SHIM_UNSYNCED  if set, a sync does nothing and is not recorded
 *
 * Calls under the root happen one at a time, so the record is in the order in which they happened.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))real(#name))

static const char *root;
static int log_fd = -1, loses_syncs;
static volatile int64_t *control; /* clock, slowness, fullness */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

__attribute__((constructor)) static void begin(void) {
  root = getenv("VERL_SHIM_ROOT");
  loses_syncs = getenv("VERL_SHIM_UNSYNCED") != NULL;
  const char *path = getenv("VERL_SHIM_LOG");
  if (path) log_fd = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  path = getenv("VERL_SHIM_CONTROL");
  int fd = path ? syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0) : -1;
  if (fd >= 0) {
    void *map = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
    if (map != MAP_FAILED) control = map;
    syscall(SYS_close, fd);
  }
}

static int is_ours(const char *path) { return root && path && !strncmp(path, root, strlen(root)); }

static const char *absolute(int folder, const char *path, char *space) {
  if (!path || path[0] == '/') return path;
  char base[PATH_MAX], link[64];
  if (folder == AT_FDCWD) {
    if (!getcwd(base, sizeof base)) return NULL;
  } else {
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t n = readlink(link, base, sizeof base - 1);
    if (n < 0) return NULL;
    base[n] = 0;
  }
  if (snprintf(space, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return NULL;
  return space;
}

static const char *of_fd(int fd, char *space) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, space, PATH_MAX - 1);
  if (n < 0) return NULL;
  space[n] = 0;
  return space;
}

static void put(const void *bytes, size_t size) {
  for (const char *at = bytes; size;) {
    long n = syscall(SYS_write, log_fd, at, size);
    if (n <= 0) abort();
    at += n, size -= n;
  }
}

static void note(const char *call, const char *path, const char *other, long offset,
                 const void *bytes, size_t length) {
  if (log_fd < 0) return;
  int before = errno;
  char line[3 * PATH_MAX];
  int n = snprintf(line, sizeof line, "%s\t%s\t%s\t%ld\t%zu\n", call, path, other, offset, length);
  put(line, n);
  if (length) put(bytes, length);
  put("\n", 1);
  errno = before;
}

/* Whether a change of the path is refused; takes its time where the disk is slow. */
static int is_refused(const char *path, int is_write) {
  if (!control || !is_ours(path)) return 0;
  if (control[1] && is_write) {
    struct timespec pause = {control[1] / 1000000, control[1] % 1000000 * 1000};
    syscall(SYS_nanosleep, &pause, NULL);
  }
  if (control[2]) errno = ENOSPC;
  return control[2] != 0;
}

/* ---- files ---------------------------------------------------------------------------------- */

static int opened(int folder, const char *given, int flags, mode_t mode) {
  char space[PATH_MAX];
  const char *path = flags & (O_CREAT | O_TRUNC) ? absolute(folder, given, space) : NULL;
  if (!is_ours(path) || (flags & O_TMPFILE) == O_TMPFILE)
    return syscall(SYS_openat, folder, given, flags, mode);
  if (is_refused(path, 0)) return -1;
  pthread_mutex_lock(&lock);
  int is_new = access(path, F_OK) != 0;
  int fd = syscall(SYS_openat, folder, given, flags, mode);
  if (fd >= 0 && is_new) note("create", path, "", 0, NULL, 0);
  if (fd >= 0 && !is_new && flags & O_TRUNC) note("truncate", path, "", 0, NULL, 0);
  pthread_mutex_unlock(&lock);
  return fd;
}

#define MODE(flags)                                  \
  mode_t mode = 0;                                   \
  if ((flags) & (O_CREAT | O_TMPFILE)) {             \
    va_list list;                                    \
    va_start(list, flags);                           \
    mode = va_arg(list, mode_t);                     \
    va_end(list);                                    \
  }

int open(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE(flags) return opened(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE(flags) return opened(folder, path, flags, mode); }
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

static ssize_t written(int fd, const void *bytes, size_t size, off_t at, int is_at) {
  char space[PATH_MAX];
  const char *path = root ? of_fd(fd, space) : NULL;
  if (!is_ours(path))
    return is_at ? syscall(SYS_pwrite64, fd, bytes, size, at) : syscall(SYS_write, fd, bytes, size);
  if (is_refused(path, 1)) return -1;
  pthread_mutex_lock(&lock);
  ssize_t n = is_at ? syscall(SYS_pwrite64, fd, bytes, size, at) : syscall(SYS_write, fd, bytes, size);
  if (n > 0) note("write", path, "", is_at ? at : lseek(fd, 0, SEEK_CUR) - n, bytes, n);
  pthread_mutex_unlock(&lock);
  return n;
}

ssize_t write(int fd, const void *bytes, size_t size) { return written(fd, bytes, size, 0, 0); }
ssize_t pwrite(int fd, const void *bytes, size_t size, off_t at) { return written(fd, bytes, size, at, 1); }
ssize_t pwrite64(int fd, const void *bytes, size_t size, off_t at) { return written(fd, bytes, size, at, 1); }

ssize_t writev(int fd, const struct iovec *parts, int count) {
  char space[PATH_MAX];
  if (!root || !is_ours(of_fd(fd, space))) return syscall(SYS_writev, fd, parts, count);
  ssize_t total = 0; /* one part after another; a short write ends it */
  for (int i = 0; i < count; i++) {
    ssize_t n = written(fd, parts[i].iov_base, parts[i].iov_len, 0, 0);
    if (n < 0) return total ? total : n;
    total += n;
    if ((size_t)n < parts[i].iov_len) break;
  }
  return total;
}

static int is_copied_by_kernel(int fd) { /* callers then read and write by themselves */
  char space[PATH_MAX];
  return root && is_ours(of_fd(fd, space));
}

ssize_t sendfile(int out, int in, off_t *at, size_t size) {
  if (is_copied_by_kernel(out)) return errno = EINVAL, -1;
  return syscall(SYS_sendfile, out, in, at, size);
}
ssize_t sendfile64(int out, int in, off_t *at, size_t size) { return sendfile(out, in, at, size); }
ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
  if (is_copied_by_kernel(out)) return errno = EXDEV, -1;
  return syscall(SYS_copy_file_range, in, from, out, to, size, flags);
}

int ftruncate(int fd, off_t size) {
  char space[PATH_MAX];
  const char *path = root ? of_fd(fd, space) : NULL;
  if (!is_ours(path)) return syscall(SYS_ftruncate, fd, size);
  pthread_mutex_lock(&lock);
  int status = syscall(SYS_ftruncate, fd, size);
  if (!status) note("truncate", path, "", size, NULL, 0);
  pthread_mutex_unlock(&lock);
  return status;
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }

static int synced(int fd, long number) {
  char space[PATH_MAX];
  const char *path = root ? of_fd(fd, space) : NULL;
  if (!is_ours(path)) return syscall(number, fd);
  if (is_refused(path, 1)) return -1;
  if (loses_syncs) return 0;
  pthread_mutex_lock(&lock);
  int status = syscall(number, fd);
  if (!status) note("sync", path, "", 0, NULL, 0);
  pthread_mutex_unlock(&lock);
  return status;
}
int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

/* ---- names ---------------------------------------------------------------------------------- */

static int renamed(int from, const char *old, int to, const char *new, unsigned flags) {
  char one[PATH_MAX], two[PATH_MAX];
  const char *before = absolute(from, old, one), *after = absolute(to, new, two);
  if (!is_ours(after)) return syscall(SYS_renameat2, from, old, to, new, flags);
  pthread_mutex_lock(&lock);
  int status = syscall(SYS_renameat2, from, old, to, new, flags);
  if (!status) note("rename", before, after, 0, NULL, 0);
  pthread_mutex_unlock(&lock);
  return status;
}
int rename(const char *old, const char *new) { return renamed(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return renamed(from, old, to, new, 0); }
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
  return renamed(from, old, to, new, flags);
}

static int removed(int folder, const char *given, int flags) {
  char space[PATH_MAX];
  const char *path = absolute(folder, given, space);
  if (!is_ours(path)) return syscall(SYS_unlinkat, folder, given, flags);
  pthread_mutex_lock(&lock);
  int status = syscall(SYS_unlinkat, folder, given, flags);
  if (!status) note("remove", path, "", 0, NULL, 0);
  pthread_mutex_unlock(&lock);
  return status;
}
int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return removed(AT_FDCWD, path, AT_REMOVEDIR); }
int unlinkat(int folder, const char *path, int flags) { return removed(folder, path, flags); }

static int made(int folder, const char *given, mode_t mode) {
  char space[PATH_MAX];
  const char *path = absolute(folder, given, space);
  if (!is_ours(path)) return syscall(SYS_mkdirat, folder, given, mode);
  if (is_refused(path, 0)) return -1;
  pthread_mutex_lock(&lock);
  int status = syscall(SYS_mkdirat, folder, given, mode);
  if (!status) note("folder", path, "", 0, NULL, 0);
  pthread_mutex_unlock(&lock);
  return status;
}
int mkdir(const char *path, mode_t mode) { return made(AT_FDCWD, path, mode); }
int mkdirat(int folder, const char *path, mode_t mode) { return made(folder, path, mode); }

/* ---- the wall clock; others go on as they are -------------------------------------------------- */

int clock_gettime(clockid_t clock, struct timespec *now) {
  int status = REAL(clock_gettime)(clock, now);
  if (!status && control && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    int64_t ns = now->tv_sec * 1000000000LL + now->tv_nsec + control[0];
    now->tv_sec = ns / 1000000000LL;
    now->tv_nsec = ns % 1000000000LL;
  }
  return status;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec precise;
  (void)zone;
  int status = clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return status;
}
time_t time(time_t *space) {
  struct timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  if (space) *space = precise.tv_sec;
  return precise.tv_sec;
}
