// One UCX worker, progressed by a thread of its own that needs no GIL and sleeps while nothing happens.
#pragma once

#include <ucp/api/ucp.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace wbridge {

// What the thread reports: an operation that is over, a frame, or a route whose peer is out of reach.
struct UcxEvent {
    enum Kind : int { finished = 0, frame = 1, lost = 2 };
    Kind kind;
    std::uint64_t number;  // of the operation or the route
    std::string text;      // what went wrong, nothing if all went well; of a frame its bytes
};

// A part of a put: from where, and where to, in bytes from the two places that are given with all of them.
struct UcxRun {
    std::uint64_t from;
    std::uint64_t to;
    std::uint64_t nbytes;
};

// What a thread calls before it works with memory that is not the host's: other than 0 is a failure.
struct Entrance {
    int (*function)(void *) = nullptr;
    void *argument = nullptr;
};

class UcxWorker {
public:
    using Settings = std::vector<std::pair<std::string, std::string>>;
    using Number = std::uint64_t;

    // `required` settings hold whatever the environment says, `preferred` ones where it is silent. Messages
    // under `frame_tag`, of at most `frame_nbytes`, are frames. The thread calls `entrance` before it opens UCX.
    UcxWorker(const Settings &required, const Settings &preferred, Number frame_tag, std::size_t frame_nbytes,
              Entrance entrance);
    UcxWorker(const UcxWorker &) = delete;
    ~UcxWorker();

    const std::string &address() const { return address_; }
    int descriptor() const { return bell_; }  // readable while there are events
    // Which kinds of memory UCX handles here, by its own names for them.
    const std::vector<std::string> &kinds() const { return kinds_; }
    std::uint64_t num_wakeups() const { return num_wakeups_; }

    // These wait for the thread. Throw std::runtime_error with the operation and UCX's reason. Memory is of kind
    // "host" or "cuda", if that is one of `kinds`.
    Number connect(const std::string &address, bool watched);
    Number map(void *memory, std::size_t nbytes, const std::string &kind);
    void unmap(Number region);
    std::string pack(Number region);
    Number unpack(Number route, const std::string &key);
    void forget_key(Number key);
    // Handle all that dead peers may have left on its way.
    void settle();

    // These return at once the number of an operation, whose end is an event. Memory is lent until then.
    Number send_frame(Number route, std::string frame);
    Number send(Number route, const void *memory, std::size_t nbytes, Number tag);
    Number receive(void *memory, std::size_t nbytes, Number tag);
    // Ends once the bytes are in place there.
    Number put(Number route, const void *memory, std::size_t nbytes, Number remote, Number key, const std::string &kind);
    Number put_runs(Number route, std::vector<UcxRun> runs, Number base, Number remote, Number key);

    std::vector<UcxEvent> drain();

    // Finish what is on its way out, as long as it takes at most `timeout_s`, and end the thread. Idempotent.
    void close(double timeout_s);

private:
    struct Operation;
    struct Frame;
    struct Route;
    // Given back when it is forgotten and no put uses it.
    using Key = std::shared_ptr<std::remove_pointer_t<ucp_rkey_h>>;

    void open(const Settings &required, const Settings &preferred, Entrance entrance);
    void run();
    bool run_commands();
    void sleep();
    void pause();
    void post(std::function<void()> command);
    void call(std::function<void()> command);
    Number begin(std::unique_ptr<Operation> operation, std::function<ucs_status_ptr_t(Operation &)> start);

    void track(Operation &operation, ucs_status_ptr_t request);
    void step(Operation &operation, ucs_status_t status);
    void finish(Operation &operation, ucs_status_t status);
    void receive_frame(Frame &frame);
    void deliver_frames();
    void emit(UcxEvent event);
    void ring();
    bool progress_until(const std::function<bool()> &is_over, std::chrono::steady_clock::time_point deadline);
    void shut(std::chrono::steady_clock::time_point deadline);
    void keep();
    void forget();
    void drop_unread();
    Route &route(Number number);

    ucs_status_ptr_t start_runs(Operation &operation, const std::vector<UcxRun> &runs, Number base, Number remote);

    static void on_run_sent(void *request, ucs_status_t status, void *operation);
    static void on_sent(void *request, ucs_status_t status, void *operation);
    static void on_received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *operation);
    static void on_frame(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *frame);
    static void on_lost(void *route, ucp_ep_h endpoint, ucs_status_t status);

    ucp_context_h context_ = nullptr;
    ucp_worker_h worker_ = nullptr;
    int wake_ = -1;  // UCX's descriptor
    int kick_ = -1;  // there are commands
    int bell_ = -1;  // there are events
    std::string address_;
    std::vector<std::string> kinds_;
    const Number frame_tag_;
    const std::size_t frame_nbytes_;
    const pid_t process_ = getpid();

    std::mutex commands_mutex_;
    std::deque<std::function<void()>> commands_;
    std::mutex events_mutex_;
    std::vector<UcxEvent> events_;
    bool unheard_ = false;  // events since the last ring; the thread's alone
    std::atomic<Number> next_{1};
    std::atomic<std::uint64_t> num_wakeups_{0};

    // The thread's alone.
    std::unordered_map<Number, std::unique_ptr<Operation>> operations_;
    std::unordered_map<Number, std::unique_ptr<Route>> routes_;
    std::unordered_map<Number, ucp_mem_h> regions_;
    std::unordered_map<Number, Key> keys_;
    std::deque<std::unique_ptr<Frame>> frames_;
    std::chrono::microseconds pause_{0};
    bool stopping_ = false;

    std::mutex closing_mutex_;
    bool closed_ = false;
    std::thread thread_;
};

}  // namespace wbridge
