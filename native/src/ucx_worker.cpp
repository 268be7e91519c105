#include "ucx_worker.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <future>
#include <stdexcept>

namespace wbridge {

namespace {

using Clock = std::chrono::steady_clock;

constexpr unsigned oldest_major = 1, oldest_minor = 19;
constexpr int num_frames = 16;  // posted receives
constexpr auto longest_pause = std::chrono::microseconds(1000);
// Longer than a third of a socket's buffer takes to drain at the speed of memory. To sleep and be woken that often
// costs more than the bytes where an idle core halts, as those of virtual machines do.
constexpr Clock::duration longest_attention = std::chrono::microseconds(300);
constexpr auto shutting = std::chrono::milliseconds(200);
// What a dead process left in a socket of this host has arrived when nothing came for so long, or when all
// that did come, of whomever, has been handled for so long.
constexpr auto settled = std::chrono::milliseconds(5);
constexpr auto surely_settled = std::chrono::milliseconds(200);

void check(ucs_status_t status, const char *operation) {
    if (status != UCS_OK) throw std::runtime_error(std::string(operation) + ": " + ucs_status_string(status));
}

int open_eventfd() {
    const int descriptor = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (descriptor < 0) throw std::runtime_error("eventfd: no descriptor is free");
    return descriptor;
}

void add_one(int descriptor) {
    const std::uint64_t one = 1;
    while (write(descriptor, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

void read_all(int descriptor) {
    std::uint64_t count;
    while (read(descriptor, &count, sizeof count) < 0 && errno == EINTR) {
    }
}

ucp_context_h open_context(const UcxWorker::Settings &required, const UcxWorker::Settings &preferred) {
    ucp_config_t *config;
    check(ucp_config_read(nullptr, nullptr, &config), "ucp_config_read");
    const std::unique_ptr<ucp_config_t, void (*)(ucp_config_t *)> held(config, ucp_config_release);
    for (const auto &[name, value] : required) check(ucp_config_modify(config, name.c_str(), value.c_str()), name.c_str());
    for (const auto &[name, value] : preferred)
        if (std::getenv(("UCX_" + name).c_str()) == nullptr)
            check(ucp_config_modify(config, name.c_str(), value.c_str()), name.c_str());
    ucp_params_t parameters{};
    parameters.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
    parameters.features = UCP_FEATURE_TAG | UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP;
    parameters.name = "wbridge";
    ucp_context_h context;
    // The version that we use, not that of the headers: an older library would warn on standard output.
    check(ucp_init_version(oldest_major, oldest_minor, &parameters, config, &context), "ucp_init");
    return context;
}

std::vector<std::string> kinds_of(ucp_context_h context) {
    ucp_context_attr_t attributes{};
    attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
    check(ucp_context_query(context, &attributes), "ucp_context_query");
    std::vector<std::string> kinds;
    for (int type = 0; type < UCS_MEMORY_TYPE_LAST; type++)
        if (attributes.memory_types & UCS_BIT(type)) kinds.emplace_back(ucs_memory_type_names[type]);
    return kinds;
}

// UCX itself maps memory that none of its transports reaches, and copies as the host does between addresses that
// the host must not touch.
ucs_memory_type_t memory_type(const std::string &kind, const std::vector<std::string> &kinds) {
    for (const auto type : {UCS_MEMORY_TYPE_HOST, UCS_MEMORY_TYPE_CUDA}) {
        if (kind != ucs_memory_type_names[type]) continue;
        if (std::find(kinds.begin(), kinds.end(), kind) != kinds.end()) return type;
        throw std::runtime_error("UCX has no transport for memory of kind '" + kind + "' here");
    }
    throw std::invalid_argument("memory of kind '" + kind + "': slots are of kind 'host' or 'cuda'");
}

ucp_request_param_t with(void *user_data) {
    ucp_request_param_t parameters{};
    parameters.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    parameters.user_data = user_data;
    return parameters;
}

}  // namespace

struct UcxWorker::Operation {
    explicit Operation(UcxWorker *of, Number on = 0) : worker(of), route(on) {}

    UcxWorker *worker;
    Number number = 0;
    Number route;             // 0: it is a receive
    std::string owned;        // the bytes of a frame
    bool must_flush = false;  // a put, until its endpoint is flushed
    Key key;                  // of a put
    std::size_t num_running = 0;  // parts of a put
    ucs_status_t failure = UCS_OK;  // of a part
    void *request = nullptr;
};

struct UcxWorker::Frame {
    UcxWorker *worker;
    std::vector<char> bytes;
    std::size_t nbytes = 0;
    bool is_whole = false;
    void *request = nullptr;
    ucp_tag_recv_info_t info{};
};

struct UcxWorker::Route {
    UcxWorker *worker;
    Number number;
    bool watched;
    ucp_ep_h endpoint = nullptr;
};

UcxWorker::UcxWorker(const Settings &required, const Settings &preferred, Number frame_tag, std::size_t frame_nbytes,
                     Entrance entrance)
    : frame_tag_(frame_tag), frame_nbytes_(frame_nbytes) {
    std::promise<void> opened;
    thread_ = std::thread([&, this] {
        try {
            open(required, preferred, entrance);
        } catch (...) {
            shut(Clock::now());
            opened.set_exception(std::current_exception());
            return;
        }
        opened.set_value();  // from here on only `this` may be used
        run();
    });
    try {
        opened.get_future().get();
    } catch (...) {
        thread_.join();
        throw;
    }
}

// In the thread that makes all calls of UCX: on a GPU they belong to the context of their thread.
void UcxWorker::open(const Settings &required, const Settings &preferred, Entrance entrance) {
    if (entrance.function != nullptr)
        if (const int code = entrance.function(entrance.argument); code != 0)
            throw std::runtime_error("the thread of UCX cannot enter the GPU: code " + std::to_string(code));
    context_ = open_context(required, preferred);
    kinds_ = kinds_of(context_);
    ucp_worker_params_t parameters{};
    parameters.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    parameters.thread_mode = UCS_THREAD_MODE_SERIALIZED;
    check(ucp_worker_create(context_, &parameters, &worker_), "ucp_worker_create");
    check(ucp_worker_get_efd(worker_, &wake_), "ucp_worker_get_efd");
    ucp_address_t *address;
    std::size_t nbytes;
    check(ucp_worker_get_address(worker_, &address, &nbytes), "ucp_worker_get_address");
    address_.assign(reinterpret_cast<const char *>(address), nbytes);
    ucp_worker_release_address(worker_, address);
    kick_ = open_eventfd();
    bell_ = open_eventfd();
    for (int index = 0; index < num_frames; index++) {
        frames_.push_back(std::make_unique<Frame>());
        frames_.back()->worker = this;
        frames_.back()->bytes.resize(frame_nbytes_);
        receive_frame(*frames_.back());
    }
}

UcxWorker::~UcxWorker() { close(0); }

UcxWorker::Number UcxWorker::connect(const std::string &address, bool watched) {
    const Number number = next_++;
    call([&] {
        auto route = std::make_unique<Route>(Route{this, number, watched});
        ucp_ep_params_t parameters{};
        parameters.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                UCP_EP_PARAM_FIELD_ERR_HANDLER;
        parameters.address = reinterpret_cast<const ucp_address_t *>(address.data());
        parameters.err_mode = watched ? UCP_ERR_HANDLING_MODE_PEER : UCP_ERR_HANDLING_MODE_NONE;
        parameters.err_handler = {on_lost, route.get()};
        check(ucp_ep_create(worker_, &parameters, &route->endpoint), "ucp_ep_create");
        routes_.emplace(number, std::move(route));
    });
    return number;
}

UcxWorker::Number UcxWorker::map(void *memory, std::size_t nbytes, const std::string &kind) {
    const Number number = next_++;
    const auto type = memory_type(kind, kinds_);
    call([&] {
        ucp_mem_map_params_t parameters{};
        parameters.field_mask =
            UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
        parameters.address = memory;
        parameters.length = nbytes;
        parameters.memory_type = type;
        ucp_mem_h region;
        check(ucp_mem_map(context_, &parameters, &region), "ucp_mem_map");
        regions_.emplace(number, region);
    });
    return number;
}

void UcxWorker::unmap(Number region) {
    call([&] {
        if (const auto found = regions_.find(region); found != regions_.end()) {
            ucp_mem_unmap(context_, found->second);
            regions_.erase(found);
        }
    });
}

std::string UcxWorker::pack(Number region) {
    std::string packed;
    call([&] {
        void *bytes;
        std::size_t nbytes;
        check(ucp_rkey_pack(context_, regions_.at(region), &bytes, &nbytes), "ucp_rkey_pack");
        packed.assign(static_cast<const char *>(bytes), nbytes);
        ucp_rkey_buffer_release(bytes);
    });
    return packed;
}

UcxWorker::Number UcxWorker::unpack(Number number, const std::string &packed) {
    const Number key = next_++;
    call([&] {
        ucp_rkey_h unpacked;
        check(ucp_ep_rkey_unpack(route(number).endpoint, packed.data(), &unpacked), "ucp_ep_rkey_unpack");
        keys_.emplace(key, Key(unpacked, ucp_rkey_destroy));
    });
    return key;
}

void UcxWorker::forget_key(Number key) {
    call([&] { keys_.erase(key); });
}

void UcxWorker::settle() {
    call([&] {
        const auto begin = Clock::now();
        for (auto last = begin, now = begin; now - last < settled && now - begin < surely_settled; now = Clock::now())
            if (ucp_worker_progress(worker_) != 0) last = Clock::now();
    });
}

UcxWorker::Number UcxWorker::send_frame(Number number, std::string frame) {
    auto operation = std::make_unique<Operation>(this, number);
    operation->owned = std::move(frame);
    return begin(std::move(operation), [this](Operation &self) {
        auto parameters = with(&self);
        parameters.cb.send = on_sent;
        return ucp_tag_send_nbx(route(self.route).endpoint, self.owned.data(), self.owned.size(), frame_tag_, &parameters);
    });
}

UcxWorker::Number UcxWorker::send(Number number, const void *memory, std::size_t nbytes, Number tag) {
    return begin(std::make_unique<Operation>(this, number), [=, this_ = this](Operation &self) {
        auto parameters = with(&self);
        parameters.cb.send = on_sent;
        return ucp_tag_send_nbx(this_->route(self.route).endpoint, memory, nbytes, tag, &parameters);
    });
}

UcxWorker::Number UcxWorker::receive(void *memory, std::size_t nbytes, Number tag) {
    return begin(std::make_unique<Operation>(this), [=, this_ = this](Operation &self) {
        auto parameters = with(&self);
        parameters.cb.recv = on_received;
        return ucp_tag_recv_nbx(this_->worker_, memory, nbytes, tag, ~Number{0}, &parameters);
    });
}

UcxWorker::Number UcxWorker::put(Number number, const void *memory, std::size_t nbytes, Number remote, Number key,
                                 const std::string &kind) {
    const auto type = memory_type(kind, kinds_);
    auto operation = std::make_unique<Operation>(this, number);
    operation->must_flush = true;
    return begin(std::move(operation), [=, this_ = this](Operation &self) {
        auto parameters = with(&self);
        parameters.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE;
        parameters.memory_type = type;
        parameters.cb.send = on_sent;
        self.key = this_->keys_.at(key);
        return ucp_put_nbx(this_->route(self.route).endpoint, memory, nbytes, remote, self.key.get(), &parameters);
    });
}

UcxWorker::Number UcxWorker::put_runs(Number number, std::vector<UcxRun> runs, Number base, Number remote, Number key) {
    auto operation = std::make_unique<Operation>(this, number);
    operation->must_flush = true;
    return begin(std::move(operation), [=, this_ = this, runs = std::move(runs)](Operation &self) {
        self.key = this_->keys_.at(key);
        return this_->start_runs(self, runs, base, remote);
    });
}

// Returns UCX's answer for all of them together: a pointer while some are on their way.
ucs_status_ptr_t UcxWorker::start_runs(Operation &operation, const std::vector<UcxRun> &runs, Number base, Number remote) {
    const ucp_ep_h endpoint = route(operation.route).endpoint;
    auto parameters = with(&operation);
    parameters.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    parameters.memory_type = UCS_MEMORY_TYPE_HOST;
    parameters.cb.send = on_run_sent;
    for (const UcxRun &run : runs) {
        const auto request = ucp_put_nbx(endpoint, reinterpret_cast<const void *>(base + run.from), run.nbytes,
                                         remote + run.to, operation.key.get(), &parameters);
        if (UCS_PTR_IS_ERR(request)) {
            operation.failure = UCS_PTR_STATUS(request);
            break;
        }
        if (request != nullptr) operation.num_running++;  // it ends later, in this thread
    }
    return operation.num_running > 0 ? &operation : UCS_STATUS_PTR(operation.failure);
}

std::vector<UcxEvent> UcxWorker::drain() {
    read_all(bell_);
    std::vector<UcxEvent> events;
    const std::lock_guard lock(events_mutex_);
    events.swap(events_);
    return events;
}

void UcxWorker::close(double timeout_s) {
    // A child of a fork has no such thread and nothing of UCX to give back, and nobody there opens the mutex.
    if (getpid() != process_) {
        if (thread_.joinable()) thread_.detach();
        new auto(std::move(keys_));  // whose ends would call UCX
        new auto(std::move(operations_));
        return;
    }
    const std::lock_guard lock(closing_mutex_);
    if (closed_) return;
    closed_ = true;
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
    post([this, deadline] {
        progress_until(
            [this] {
                return std::none_of(operations_.begin(), operations_.end(), [](const auto &entry) { return entry.second->route != 0; });
            },
            deadline);
        stopping_ = true;
    });
    thread_.join();
}

// Before it sleeps, the thread looks around for as long as it has worked: a slow link keeps no core busy.
void UcxWorker::run() {
    auto attention = Clock::duration::zero();
    auto since = Clock::now();
    while (!stopping_) {
        bool worked = run_commands();
        if (stopping_) break;
        while (ucp_worker_progress(worker_) != 0) {
            worked = true;
            ring();
            if (run_commands() && stopping_) break;
        }
        if (stopping_) break;
        ring();
        const auto taken = Clock::now() - since;
        since += taken;
        if (worked) {
            pause_ = std::chrono::microseconds(0);
            attention = std::min(attention + taken, longest_attention);
        } else if (taken < attention) {
            attention -= taken;
            std::this_thread::yield();  // to who else wants this core
        } else {
            attention = Clock::duration::zero();
            sleep();
            since = Clock::now();
        }
    }
    shut(Clock::now() + shutting);
    ring();
}

bool UcxWorker::run_commands() {
    std::deque<std::function<void()>> commands;
    {
        const std::lock_guard lock(commands_mutex_);
        commands.swap(commands_);
    }
    for (const auto &command : commands) command();
    return !commands.empty();
}

void UcxWorker::sleep() {
    const ucs_status_t status = ucp_worker_arm(worker_);
    if (status == UCS_ERR_BUSY) {
        pause();
        return;
    }
    pollfd descriptors[] = {{wake_, POLLIN, 0}, {kick_, POLLIN, 0}};
    while (poll(descriptors, 2, -1) < 0 && errno == EINTR) {
    }
    read_all(kick_);
    num_wakeups_++;
    pause_ = std::chrono::microseconds(0);
}

// UCX cannot be armed while a peer's queue is full: look again, ever less often, until it is not.
void UcxWorker::pause() {
    if (pause_.count() > 10) {
        pollfd descriptor{kick_, POLLIN, 0};
        const timespec wait{0, static_cast<long>(pause_.count()) * 1000};
        ppoll(&descriptor, 1, &wait, nullptr);
        read_all(kick_);
    }
    pause_ = std::min(2 * pause_ + std::chrono::microseconds(1), longest_pause);
}

void UcxWorker::post(std::function<void()> command) {
    bool was_empty;
    {
        const std::lock_guard lock(commands_mutex_);
        was_empty = commands_.empty();
        commands_.push_back(std::move(command));
    }
    if (was_empty) add_one(kick_);
}

void UcxWorker::call(std::function<void()> command) {
    std::promise<void> done;
    {
        const std::lock_guard lock(closing_mutex_);
        if (closed_) throw std::runtime_error("the UCX worker is closed");
        post([&] {
            try {
                command();
                done.set_value();
            } catch (...) {
                done.set_exception(std::current_exception());
            }
        });
    }
    done.get_future().get();
}

UcxWorker::Number UcxWorker::begin(std::unique_ptr<Operation> operation,
                                   std::function<ucs_status_ptr_t(Operation &)> start) {
    const Number number = operation->number = next_++;
    const auto shared = std::make_shared<std::unique_ptr<Operation>>(std::move(operation));
    const std::lock_guard lock(closing_mutex_);
    if (closed_) throw std::runtime_error("the UCX worker is closed");
    post([this, shared, start = std::move(start)] {
        Operation &self = **shared;
        operations_.emplace(self.number, std::move(*shared));
        try {
            track(self, start(self));
        } catch (const std::out_of_range &) {  // its route or key has been given up
            finish(self, UCS_ERR_INVALID_PARAM);
        }
    });
    return number;
}

void UcxWorker::track(Operation &operation, ucs_status_ptr_t request) {
    if (request == nullptr || UCS_PTR_IS_ERR(request))
        step(operation, UCS_PTR_STATUS(request));
    else
        operation.request = request;
}

// One call of UCX is over. The bytes of a put are in place only when its endpoint has been flushed.
void UcxWorker::step(Operation &operation, ucs_status_t status) {
    operation.request = nullptr;
    if (!operation.must_flush || status != UCS_OK) return finish(operation, status);
    if (stopping_) return finish(operation, UCS_ERR_CANCELED);
    operation.must_flush = false;
    auto parameters = with(&operation);
    parameters.cb.send = on_sent;
    track(operation, ucp_ep_flush_nbx(route(operation.route).endpoint, &parameters));
}

void UcxWorker::finish(Operation &operation, ucs_status_t status) {
    emit({UcxEvent::finished, operation.number, status == UCS_OK ? "" : ucs_status_string(status)});
    operations_.erase(operation.number);
}

void UcxWorker::receive_frame(Frame &frame) {
    auto parameters = with(&frame);
    parameters.op_attr_mask |= UCP_OP_ATTR_FIELD_RECV_INFO;
    parameters.cb.recv = on_frame;
    parameters.recv_info.tag_info = &frame.info;
    frame.is_whole = false;
    const auto request = ucp_tag_recv_nbx(worker_, frame.bytes.data(), frame.bytes.size(), frame_tag_, ~Number{0}, &parameters);
    if (request == nullptr || UCS_PTR_IS_ERR(request)) {
        frame.is_whole = true;
        frame.nbytes = request == nullptr ? frame.info.length : 0;
    } else {
        frame.request = request;
    }
}

// Receives match in the order in which they were posted, and so does this queue.
void UcxWorker::deliver_frames() {
    while (!stopping_ && frames_.front()->is_whole) {
        auto frame = std::move(frames_.front());
        frames_.pop_front();
        if (frame->nbytes > 0) emit({UcxEvent::frame, 0, std::string(frame->bytes.data(), frame->nbytes)});
        receive_frame(*frame);
        frames_.push_back(std::move(frame));
    }
}

void UcxWorker::emit(UcxEvent event) {
    const std::lock_guard lock(events_mutex_);
    events_.push_back(std::move(event));
    unheard_ = true;
}

void UcxWorker::ring() {
    if (!unheard_) return;
    unheard_ = false;
    add_one(bell_);
}

bool UcxWorker::progress_until(const std::function<bool()> &is_over, Clock::time_point deadline) {
    while (!is_over()) {
        if (ucp_worker_progress(worker_) == 0) std::this_thread::yield();
        if (Clock::now() >= deadline) return false;
    }
    return true;
}

// Cancel what still runs and give everything back. Where a peer neither answers nor can be told to be dead,
// UCX keeps some of it until the process ends.
void UcxWorker::shut(Clock::time_point deadline) {
    stopping_ = true;
    std::vector<void *> endings;
    if (worker_ != nullptr) {
        auto parameters = ucp_request_param_t{};
        if (const auto flush = ucp_worker_flush_nbx(worker_, &parameters); UCS_PTR_IS_PTR(flush)) {
            progress_until([&] { return ucp_request_check_status(flush) != UCS_INPROGRESS; }, deadline);
            endings.push_back(flush);
        }
        std::vector<void *> receives;  // cancelling one may end its operation at once
        for (const auto &[number, operation] : operations_)
            if (operation->request != nullptr && operation->route == 0) receives.push_back(operation->request);
        for (void *request : receives) ucp_request_cancel(worker_, request);
        for (const auto &frame : frames_)
            if (frame->request != nullptr) ucp_request_cancel(worker_, frame->request);
        for (const auto &[number, route] : routes_) {
            parameters.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
            parameters.flags = route->watched ? UCP_EP_CLOSE_FLAG_FORCE : 0;
            if (const auto ending = ucp_ep_close_nbx(route->endpoint, &parameters); UCS_PTR_IS_PTR(ending))
                endings.push_back(ending);
        }
        const bool is_over = progress_until(
            [&] {
                return operations_.empty() &&
                       std::all_of(frames_.begin(), frames_.end(), [](const auto &frame) { return frame->request == nullptr; }) &&
                       std::all_of(endings.begin(), endings.end(), [](void *ending) { return ucp_request_check_status(ending) != UCS_INPROGRESS; });
            },
            deadline);
        for (void *ending : endings) ucp_request_free(ending);
        if (!is_over) return keep();
        drop_unread();
        keys_.clear();
        for (const auto &[number, region] : regions_) ucp_mem_unmap(context_, region);
        ucp_worker_destroy(worker_);
    }
    if (context_ != nullptr) ucp_cleanup(context_);
    forget();
}

// UCX would use what it still holds while its worker is destroyed: all of that stays until the process ends.
void UcxWorker::keep() {
    new auto(std::move(keys_));
    new auto(std::move(operations_));
    new auto(std::move(frames_));
    new auto(std::move(routes_));
    forget();
}

void UcxWorker::forget() {
    if (kick_ >= 0) ::close(kick_);
    if (bell_ >= 0) ::close(bell_);
    worker_ = nullptr;
    context_ = nullptr;
    kick_ = bell_ = -1;
}

// UCX warns of messages that nobody has received.
void UcxWorker::drop_unread() {
    std::vector<char> nowhere(frame_nbytes_);
    ucp_tag_recv_info_t info;
    while (const auto message = ucp_tag_probe_nb(worker_, frame_tag_, ~Number{0}, 1, &info)) {
        const ucp_request_param_t parameters{};
        const auto request = ucp_tag_msg_recv_nbx(worker_, nowhere.data(), nowhere.size(), message, &parameters);
        if (UCS_PTR_IS_PTR(request)) {
            ucp_request_cancel(worker_, request);
            ucp_request_free(request);
        }
    }
}

UcxWorker::Route &UcxWorker::route(Number number) { return *routes_.at(number); }

void UcxWorker::on_sent(void *request, ucs_status_t status, void *data) {
    auto &operation = *static_cast<Operation *>(data);
    ucp_request_free(request);
    operation.worker->step(operation, status);
}

void UcxWorker::on_run_sent(void *request, ucs_status_t status, void *data) {
    auto &operation = *static_cast<Operation *>(data);
    ucp_request_free(request);
    if (operation.failure == UCS_OK) operation.failure = status;
    if (--operation.num_running == 0) operation.worker->step(operation, operation.failure);
}

void UcxWorker::on_received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *, void *data) {
    on_sent(request, status, data);
}

void UcxWorker::on_frame(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *data) {
    auto &frame = *static_cast<Frame *>(data);
    ucp_request_free(request);
    frame.request = nullptr;
    frame.nbytes = status == UCS_OK ? info->length : 0;
    frame.is_whole = true;
    frame.worker->deliver_frames();
}

void UcxWorker::on_lost(void *data, ucp_ep_h, ucs_status_t status) {
    auto &route = *static_cast<Route *>(data);
    route.worker->emit({UcxEvent::lost, route.number, ucs_status_string(status)});
}

}  // namespace wbridge
