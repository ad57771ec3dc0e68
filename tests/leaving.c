/* Preloaded into every process of a test: notes each address and name beyond this machine that a process asks for, and
   refuses it, so that nothing leaves. Libraries in C and C++ are seen as well as Python. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void note(const char *call, const char *what) {
    char line[512];
    int file = open(getenv("LEAVING_LOG"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    int size = snprintf(line, sizeof line, "%s %s (process %d)\n", call, what, getpid());
    if (file >= 0 && write(file, line, size) >= 0) close(file);
}

static int stays(const char *call, const struct sockaddr *address) {
    char text[INET6_ADDRSTRLEN] = "";
    if (address == NULL) return 1;
    if (address->sa_family == AF_INET) {
        const struct in_addr *v4 = &((const struct sockaddr_in *)address)->sin_addr;
        if ((ntohl(v4->s_addr) >> 24) == 127 || v4->s_addr == 0) return 1;
        inet_ntop(AF_INET, v4, text, sizeof text);
    } else if (address->sa_family == AF_INET6) {
        const struct in6_addr *v6 = &((const struct sockaddr_in6 *)address)->sin6_addr;
        if (IN6_IS_ADDR_LOOPBACK(v6) || IN6_IS_ADDR_UNSPECIFIED(v6)) return 1;
        if (IN6_IS_ADDR_V4MAPPED(v6) && v6->s6_addr[12] == 127) return 1;
        inet_ntop(AF_INET6, v6, text, sizeof text);
    } else {
        return 1;
    }
    note(call, text);
    errno = ENETUNREACH;
    return 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int connect(int fd, const struct sockaddr *address, socklen_t size) {
    return stays("connect", address) ? REAL(connect)(fd, address, size) : -1;
}

ssize_t sendto(int fd, const void *data, size_t n, int flags, const struct sockaddr *to, socklen_t size) {
    return stays("sendto", to) ? REAL(sendto)(fd, data, n, flags, to, size) : -1;
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    return stays("sendmsg", message->msg_name) ? REAL(sendmsg)(fd, message, flags) : -1;
}

int sendmmsg(int fd, struct mmsghdr *messages, unsigned int n, int flags) {
    for (unsigned int i = 0; i < n; i++)
        if (!stays("sendmmsg", messages[i].msg_hdr.msg_name)) return -1;
    return REAL(sendmmsg)(fd, messages, n, flags);
}

static int local_name(const char *name) {
    unsigned char address[16];
    return name == NULL || strcmp(name, "localhost") == 0 || strcmp(name, "") == 0 ||
           inet_pton(AF_INET, name, address) == 1 || inet_pton(AF_INET6, name, address) == 1;
}

int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    if (local_name(name)) return REAL(getaddrinfo)(name, service, hints, found);
    note("getaddrinfo", name);
    return EAI_FAIL;
}

struct hostent *gethostbyname(const char *name) {
    if (local_name(name)) return REAL(gethostbyname)(name);
    note("gethostbyname", name);
    return NULL;
}
