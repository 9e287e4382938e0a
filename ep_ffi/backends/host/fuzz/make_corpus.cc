// SPDX-License-Identifier: Apache-2.0

// Writes the seeds of the fuzz targets:
//
//   ./bazelw run //ep_ffi/backends/host/fuzz:make_corpus -- folder

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "ep_ffi/backends/host/fuzz/conversation.h"
#include "ep_ffi/backends/host/fuzz/sample.h"
#include "ep_ffi/backends/host/transport/wire.h"

namespace ep::host {
namespace {

std::string Bytes(const void* data, size_t size) {
  return std::string(static_cast<const char*>(data), size);
}

template <typename T>
std::string Bytes(const std::vector<T>& values) {
  return Bytes(values.data(), values.size() * sizeof(T));
}

class Corpus {
 public:
  explicit Corpus(std::string folder) : folder_(std::move(folder)) {}

  void Plans() const {
    const PlanDims dims = SampleDims(/*ep_size=*/4);
    const auto write = [&](const char* name, const PlanDims& d, int64_t rank) {
      Write(name, Bytes(Build(d, rank, SampleSorted(d)).mem));
    };
    write("plan/good_plan", dims, 0);
    write("plan/of_another_rank", dims, 1);
    PlanDims other = dims;
    other.alignment = 1;
    write("plan/of_another_layer", other, 0);
    // This plan has as many bytes, but is from a group of another size.
    write("plan/of_another_group", SampleDims(/*ep_size=*/2), 0);
    std::vector<SortedChoices> rotated = SampleSorted(dims);
    std::swap(rotated[0], rotated[1]);
    rotated[2] = rotated[3];
    Write("plan/of_another_routing", Bytes(Build(dims, 0, rotated).mem));
  }

  void Choices() const {
    const auto write = [&](const char* name, const SortedChoices& choices) {
      Write(name, Bytes(choices.starts) + Bytes(choices.order));
    };
    const PlanDims dims = SampleDims(/*ep_size=*/4);
    SortedChoices choices = SampleSorted(dims)[1];
    write("choices/good_choices", choices);
    std::fill(choices.starts.begin(), choices.starts.end(), 0);
    write("choices/good_none", choices);
    std::fill(choices.starts.begin() + 1, choices.starts.end(),
              dims.num_choices());
    write("choices/good_all_of_one_expert", choices);
  }

  // Writes what the real process sends, as if it came from the other one.
  void Messages() const {
    enum : char { kNoDescriptor, kSegmentDescriptor };
    Conversation conversation;
    std::string all, of_others;
    for (int i = 0; i < 4; ++i) {  // two segments, two posts
      Message message;
      std::string text;
      const std::string received = conversation.impostor().Receive();
      if (!Decode(received.data(), received.size(), &message, &text)) {
        std::cerr << "a message is missing" << std::endl;
      }
      const char descriptor = message.type == Message::kSegment
                                  ? kSegmentDescriptor
                                  : kNoDescriptor;
      message.rank = 1;
      all += Record(descriptor, Encode(message, text));
      message.domain = 1;
      for (int32_t rank : {0, 1}) {
        message.rank = rank;
        of_others += Record(descriptor, Encode(message, text));
      }
    }
    Write("messages/good_exchange", all);
    Write("messages/exchange_of_others", of_others);

    Message fail = {};
    fail.type = Message::kFail;
    fail.code = static_cast<int32_t>(Code::kInvalidArgument);
    fail.launch.run_id = 1;
    Message release = {};
    release.type = Message::kRelease;
    Message bye = {};
    bye.type = Message::kBye;
    Write("messages/failure",
          Record(kNoDescriptor, Encode(fail, "bad ids")) + all);
    fail.code = static_cast<int32_t>(Code::kOk);
    Write("messages/failure_that_is_none",
          Record(kNoDescriptor, Encode(fail, "good ids")));
    Write("messages/farewell", Record(kNoDescriptor, Encode(release, "")) +
                                   Record(kNoDescriptor, Encode(bye, "")));
  }

 private:
  // Returns a message as messages_fuzz.cc reads it.
  static std::string Record(char descriptors, const std::string& message) {
    std::string record = {descriptors, 0, static_cast<char>(message.size()),
                          static_cast<char>(message.size() >> 8)};
    record.resize(8);
    record += message;
    record.resize((record.size() + 7) / 8 * 8);
    return record;
  }

  void Write(const std::string& name, const std::string& bytes) const {
    std::ofstream file(folder_ + "/" + name, std::ios::binary);
    if (!(file << bytes)) std::cerr << "cannot write " << name << std::endl;
  }

  const std::string folder_;
};

}  // namespace
}  // namespace ep::host

int main(int argc, char** argv) {
  if (argc != 2) return 1;
  const ep::host::Corpus corpus(argv[1]);
  corpus.Plans();
  corpus.Choices();
  corpus.Messages();
  return 0;
}
