#include "pool.hpp"

#include <pthread.h>
#include <unistd.h>

#include <system_error>
#include <thread>

namespace wbridge {

struct Pool::Job {
    const std::function<void(std::size_t)> &work;
    const std::size_t num_units;
    std::atomic<std::size_t> next{0};
    std::size_t num_helping = 0;  // guarded by the pool's mutex

    void take_part() {
        for (std::size_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < num_units;) work(unit);
    }
};

Pool::Pool(std::size_t num_threads) : num_threads_(num_threads) {}

std::size_t Pool::num_threads() const {
    std::lock_guard lock(mutex_);
    return num_threads_;
}

void Pool::set_num_threads(std::size_t num_threads) {
    std::lock_guard lock(mutex_);
    num_threads_ = num_threads;
}

void Pool::run(std::size_t num_units, const std::function<void(std::size_t)> &work) {
    Job job{work, num_units};
    const pid_t owner = owner_;
    // A child of fork has no helpers, and the mutex may have been held when it was forked.
    if (num_units < 2 || (owner != 0 && owner != getpid())) return job.take_part();
    {
        std::lock_guard lock(mutex_);
        start_helpers();
        jobs_.push_back(&job);
    }
    has_work_.notify_all();
    job.take_part();
    std::unique_lock lock(mutex_);
    jobs_.remove(&job);
    job_left_.wait(lock, [&job] { return job.num_helping == 0; });
}

void Pool::start_helpers() {
    owner_ = getpid();
    while (num_started_ + 1 < num_threads_) {
        try {
            std::thread helper([this, index = num_started_] { help(index); });
            pthread_setname_np(helper.native_handle(), "wbridge-copy");
            helper.detach();  // it sleeps between copies until the process ends
            ++num_started_;
        } catch (const std::system_error &) {
            return;  // no thread to be had: the caller does more of the work
        }
    }
}

void Pool::help(std::size_t index) {
    std::unique_lock lock(mutex_);
    for (;;) {
        Job *job = nullptr;
        has_work_.wait(lock, [&] { return index + 1 < num_threads_ && (job = find_work()) != nullptr; });
        ++job->num_helping;
        lock.unlock();
        job->take_part();
        lock.lock();
        if (--job->num_helping == 0) job_left_.notify_all();
    }
}

Pool::Job *Pool::find_work() {
    for (Job *job : jobs_)
        if (job->next.load(std::memory_order_relaxed) < job->num_units) return job;
    return nullptr;
}

}  // namespace wbridge
