/* A worker of benchmarks/agents.py: it connects to its agent, hands that connection to the benchmark, which speaks on
 * it, and ends when the benchmark says so, with the code that it is given. Under torchrun there is no connection to hand
 * over: it only says which rank it is. Usage: member SOCKET-OF-THE-BENCHMARK */
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static int connected(int kind, const char *path)
{
	struct sockaddr_un where = {.sun_family = AF_UNIX};
	int link = socket(AF_UNIX, kind | SOCK_CLOEXEC, 0);

	strncpy(where.sun_path, path, sizeof where.sun_path - 1);
	if (link < 0 || connect(link, (struct sockaddr *)&where, sizeof where))
		_exit(3);
	return link;
}

int main(int count, char **words)
{
	const char *name = getenv("ELAUNCH_WORKER"), *agent = getenv("ELAUNCH_CONTROL"), *rank = getenv("RANK");
	char place[CMSG_SPACE(sizeof(int))] = {0};
	unsigned char code;
	struct iovec text;
	struct msghdr message = {.msg_iov = &text, .msg_iovlen = 1, .msg_control = place, .msg_controllen = sizeof place};
	struct cmsghdr *head;
	int crew, control;

	if (count != 2 || !rank)
		return 2;
	crew = connected(SOCK_SEQPACKET, words[1]);
	if (!name || !agent) {
		if (send(crew, rank, strlen(rank), 0) < 0)
			return 4;
		return read(crew, &code, 1) == 1 ? code : 5;
	}
	control = connected(SOCK_STREAM, agent);
	text = (struct iovec){(void *)name, strlen(name)};
	head = CMSG_FIRSTHDR(&message);
	head->cmsg_level = SOL_SOCKET;
	head->cmsg_type = SCM_RIGHTS;
	head->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(head), &control, sizeof control);
	if (sendmsg(crew, &message, 0) < 0)
		return 4;
	close(control);
	return read(crew, &code, 1) == 1 ? code : 5;
}
